"""Figures for Prometheus. They have no stream names, so their number is bounded."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mgtta.serve.cluster import AnyStreams

BUCKETS_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOTALS = {
    "images": "Images that were answered",
    "batches": "Batches that were answered",
    "updates": "Updates of all streams",
    "asked": "Images of the live view's sample that the source model was asked about",
    "refused": "Requests that were refused because too much waited",
    "failed": "Requests that failed",
    "saves": "States that were saved",
    "failed_saves": "States that could not be saved",
    "loads": "States that were loaded",
    "evictions": "Streams that left the memory",
}


class Metrics:
    """The counts of requests, and those of the streams as they stand when they are asked for."""

    def __init__(self, streams: AnyStreams):
        self.registry = CollectorRegistry()
        self.requests = Counter("mgtta_requests", "Requests by status", ["status"], registry=self.registry)
        self.seconds = Histogram(
            "mgtta_answer_seconds",
            "From the whole body to the answer",
            buckets=BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_OfStreams(streams))


class _OfStreams(Collector):
    def __init__(self, streams: AnyStreams):
        self.streams = streams

    def collect(self) -> Iterator[Metric]:
        totals = self.streams.totals
        for name, what in TOTALS.items():
            yield CounterMetricFamily(f"mgtta_{name}", what, value=totals[name])
        busy = CounterMetricFamily("mgtta_busy_seconds", "Time of the computing thread", labels=["on"])
        for name, seconds in self.streams.busy_seconds.items():
            busy.add_metric([name], seconds)
        yield busy
        yield GaugeMetricFamily("mgtta_streams", "Streams that are known", value=len(self.streams.names()))
        yield GaugeMetricFamily("mgtta_loaded_streams", "Streams in memory", value=self.streams.loaded_streams)
        yield GaugeMetricFamily("mgtta_queued_images", "Images that wait", value=self.streams.queued_images)
        yield GaugeMetricFamily(
            "mgtta_longest_pause_seconds",
            "The longest time for which answers waited for updates and a save",
            value=self.streams.longest_pause_seconds,
        )
