"""mgtta: online test-time adaptation of image classifiers with a learned optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mgtta.adaptation.estimate import Calibration, load_calibration, save_calibration
    from mgtta.adaptation.guarded import Guard, guarded
    from mgtta.adaptation.monitor import Monitor, Signals
    from mgtta.evaluation.loop import evaluate
    from mgtta.evaluation.record import Record
    from mgtta.learned.files import import_released, load_generator, save_generator
    from mgtta.learned.generator import MetaGradientGenerator
    from mgtta.learned.optimizer import MGG
    from mgtta.losses import objective
    from mgtta.methods.create import create
    from mgtta.models.classifier import Classifier
    from mgtta.models.fisher import Fisher, fisher_information, load_fisher, save_fisher
    from mgtta.models.loading import load_model
    from mgtta.models.norms import norm_parameters
    from mgtta.models.source import SourceStatistics, load_source, save_source, source_statistics
    from mgtta.report import write_report
    from mgtta.running.adapt import adapt_stream
    from mgtta.running.calibrate import calibrate
    from mgtta.running.resume import load_state, save_state
    from mgtta.training.meta import meta_train

_HOME = {  # loaded at first use, so that the command line answers without importing torch
    "Calibration": "adaptation.estimate",
    "Classifier": "models.classifier",
    "Fisher": "models.fisher",
    "Guard": "adaptation.guarded",
    "MGG": "learned.optimizer",
    "MetaGradientGenerator": "learned.generator",
    "Monitor": "adaptation.monitor",
    "Record": "evaluation.record",
    "Signals": "adaptation.monitor",
    "SourceStatistics": "models.source",
    "adapt_stream": "running.adapt",
    "calibrate": "running.calibrate",
    "create": "methods.create",
    "evaluate": "evaluation.loop",
    "fisher_information": "models.fisher",
    "guarded": "adaptation.guarded",
    "import_released": "learned.files",
    "load_calibration": "adaptation.estimate",
    "load_fisher": "models.fisher",
    "load_generator": "learned.files",
    "load_model": "models.loading",
    "load_source": "models.source",
    "load_state": "running.resume",
    "meta_train": "training.meta",
    "norm_parameters": "models.norms",
    "objective": "losses",
    "save_calibration": "adaptation.estimate",
    "save_fisher": "models.fisher",
    "save_generator": "learned.files",
    "save_source": "models.source",
    "save_state": "running.resume",
    "source_statistics": "models.source",
    "write_report": "report",
}

__all__ = [
    "MGG",
    "Calibration",
    "Classifier",
    "Fisher",
    "Guard",
    "MetaGradientGenerator",
    "Monitor",
    "Record",
    "Signals",
    "SourceStatistics",
    "adapt_stream",
    "calibrate",
    "create",
    "evaluate",
    "fisher_information",
    "guarded",
    "import_released",
    "load_calibration",
    "load_fisher",
    "load_generator",
    "load_model",
    "load_source",
    "load_state",
    "meta_train",
    "norm_parameters",
    "objective",
    "save_calibration",
    "save_fisher",
    "save_generator",
    "save_source",
    "save_state",
    "source_statistics",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
