"""Where a monitor's signals go: JSON lines, TensorBoard, Prometheus. Any function of Signals is a sink too."""

import json
import os
from pathlib import Path
from typing import Any

from mgtta.adaptation.monitor import Signals

HELP = {  # what a gauge shows, for Prometheus
    "images": "Images so far",
    "updates": "Updates since the last reset",
    "skipped": "Batches that were not learned from, since the last reset",
    "entropy": "Mean entropy of the predictions in nats",
    "confidence": "Mean probability of the predicted classes",
    "changed": "Share of predictions that differ from the source model's",
    "drift": "Distance of the features from the source's, in squared standard deviations",
    "shifts": "Shifts of the domain so far",
    "shifted": "1 if the last batch brought a shift",
    "alarms": "Events of a guard or of recall so far",
    "accuracy": "Estimated accuracy in percent",
    "source_accuracy": "Estimated accuracy of the source model in percent",
    "gain": "Estimated gain of adaptation in points",
}


class JsonLines:
    """Append one line of JSON for each batch to a file; each line is complete as soon as its batch is."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, signals: Signals) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(signals.plain()) + "\n")


class TensorBoard:
    """Write each signal as a scalar over the number of images; needs the package tensorboard.

    Args:
        folder: the folder that `tensorboard --logdir` shows.
    """

    def __init__(self, folder: str | os.PathLike):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoard cannot be imported ({error}): pip install tensorboard") from error
        self.writer = SummaryWriter(str(folder))

    def __call__(self, signals: Signals) -> None:
        numbers = signals.numbers()
        images = int(numbers.pop("images"))
        for name, value in numbers.items():
            self.writer.add_scalar(f"mgtta/{name}", value, images)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Prometheus:
    """Set the gauges mgtta_stream_NAME{stream="..."}; needs the package prometheus-client.

    Args:
        stream: value of the label `stream`.
        registry: prometheus_client's registry; by default its global one. Several streams may share a registry.
    """

    def __init__(self, stream: str = "default", registry: Any = None):
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                "prometheus_client cannot be imported: pip install prometheus-client, or pip install 'mgtta[serve]'"
            ) from error
        self.stream = stream
        registry = prometheus_client.REGISTRY if registry is None else registry
        self.gauges = _gauges(registry)

    def __call__(self, signals: Signals) -> None:
        for name, value in signals.numbers().items():
            self.gauges[name].labels(self.stream).set(value)


_GAUGES: dict[int, tuple[Any, dict[str, Any]]] = {}  # id of a registry -> the registry and its gauges


def _gauges(registry: Any) -> dict[str, Any]:
    """Return the gauges of a registry; they are made once, since a registry refuses a second one of a name."""
    from prometheus_client import Gauge

    if id(registry) not in _GAUGES:
        gauges = {}
        for name, what in HELP.items():
            gauges[name] = Gauge(f"mgtta_stream_{name}", what, ["stream"], registry=registry)
        _GAUGES[id(registry)] = (registry, gauges)
    return _GAUGES[id(registry)][1]
