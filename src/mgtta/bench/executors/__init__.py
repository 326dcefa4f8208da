"""Where tasks run: in this process, in worker processes, or on a Ray cluster, behind one interface."""

from mgtta.bench.executors.base import Executor, WorkerError
from mgtta.bench.executors.here import Here
from mgtta.bench.executors.processes import Processes
from mgtta.bench.executors.ray import OnRay

__all__ = ["Executor", "Here", "OnRay", "Processes", "WorkerError"]
