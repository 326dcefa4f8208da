"""mgtta: online test-time adaptation of image classifiers with a learned optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from mgtta.checkpoint import import_released, load_generator, save_generator
    from mgtta.evaluation import Record, evaluate
    from mgtta.fisher import Fisher, fisher_information, load_fisher, save_fisher
    from mgtta.generator import MetaGradientGenerator
    from mgtta.guard import Guard, guarded
    from mgtta.losses import objective
    from mgtta.meta import meta_train
    from mgtta.models import Classifier, load_model
    from mgtta.optim.mgg import MGG
    from mgtta.params import norm_parameters
    from mgtta.recipes import create
    from mgtta.report import write_report
    from mgtta.running import load_state, save_state
    from mgtta.source import SourceStatistics, load_source, save_source, source_statistics

_HOME = {  # loaded at first use, so that the command line answers without importing torch
    "Classifier": "models",
    "Fisher": "fisher",
    "Guard": "guard",
    "MGG": "optim.mgg",
    "MetaGradientGenerator": "generator",
    "Record": "evaluation",
    "SourceStatistics": "source",
    "create": "recipes",
    "evaluate": "evaluation",
    "fisher_information": "fisher",
    "guarded": "guard",
    "import_released": "checkpoint",
    "load_fisher": "fisher",
    "load_generator": "checkpoint",
    "load_model": "models",
    "load_source": "source",
    "load_state": "running",
    "meta_train": "meta",
    "norm_parameters": "params",
    "objective": "losses",
    "save_fisher": "fisher",
    "save_generator": "checkpoint",
    "save_source": "source",
    "save_state": "running",
    "source_statistics": "source",
    "write_report": "report",
}

__all__ = [
    "MGG",
    "Classifier",
    "Fisher",
    "Guard",
    "MetaGradientGenerator",
    "Record",
    "SourceStatistics",
    "create",
    "evaluate",
    "fisher_information",
    "guarded",
    "import_released",
    "load_fisher",
    "load_generator",
    "load_model",
    "load_source",
    "load_state",
    "meta_train",
    "norm_parameters",
    "objective",
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
