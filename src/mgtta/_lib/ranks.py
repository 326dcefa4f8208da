"""One stream over many processes: what a method must know of the images that other ranks hold.

Each rank takes its share of every batch. Parameters, moments and memory are the same on all ranks, since they start
and move alike; they are never sent. A method computes with the images it has and asks here for what hangs on all.

Notation    K ranks; s_r what rank r adds to a sum, S = s_1 + ... + s_K; L(S, theta) the loss, the same on every rank

    dL/dtheta = dL/dS (ds_1/dtheta + ... + ds_K/dtheta) + what comes from theta directly, such as a penalty

A sum gives S on the way forward, and on the way back K dL/dS to each s_r, without a message, since every rank knows
it. The mean over ranks of what they find is then dL/dtheta: each s_r counts once, and a penalty once and not K times.
So a step sends the sums before the backward pass and the gradients after it. One message cannot do: the gradient of a
standard deviation over all images needs that standard deviation first.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = 300.0  # seconds that a rank waits for the others
Moments = tuple[Tensor, Tensor | None]  # mean and unbiased std, which one image does not have


class RankError(RuntimeError):
    """Another rank died, hangs, or is doing something else."""


class Alone:
    """One process, which holds every image: all is as if there were no ranks."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int] | None:
        """Which share of every batch a stream gives to this rank."""
        return None if self.size == 1 else (self.rank, self.size)

    def mean(self, values: Tensor) -> Tensor | None:
        """The mean over the images of all ranks, (n, ...) -> (...), differentiable; None where there are none."""
        return values.mean(0) if len(values) else None

    def moments(self, values: Tensor, features: Tensor, around: Tensor) -> tuple[Tensor, Moments]:
        """The mean of `values` (n,) and the moments (D,) of features (n, D), over the images of all ranks;
        differentiable.

        Args:
            around: a point (D,) near the features, the same on all ranks.
        """
        return values.mean(), moments(features)

    def average(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The mean over ranks of each gradient."""
        return grads

    def all(self, true: Tensor | bool) -> bool:
        """Whether it is true on every rank."""
        return bool(true)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over ranks."""
        return list(numbers)

    def most(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return number

    def draw(self, n: int, draw: Callable[[int], Tensor]) -> Tensor | None:
        """The rows of this rank's n images of what `draw` gives for those of all; None where there are none.

        Random numbers are drawn for the images of all ranks, so that every rank's generator stands where one
        process's would.
        """
        return draw(n) if n else None

    def gather(self, items: list[Any]) -> list[Any]:
        """The ranks' items one after another, in the order of the ranks."""
        return items

    def tell(self, what: Callable[[], Any]) -> Any:
        """What the first rank finds."""
        return what()

    def agree(self, what: str, value: Any) -> None:
        """Refuse where a value that must be the same on all ranks is not."""


ALONE = Alone()


class Ranks(Alone):
    """The ranks of a process group; every call is made by all of them, in the same order.

    Attributes:
        messages, bytes: collective operations on tensors so far, and what this rank put into them.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the process group that it was given")
        self.device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
        self.messages = self.bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a copy of a method stays in the same group

    def mean(self, values: Tensor) -> Tensor | None:
        total, count = self._sums([values.sum(0), _count(values)])
        return total / count if count else None

    def moments(self, values: Tensor, features: Tensor, around: Tensor) -> tuple[Tensor, Moments]:
        apart = features - around  # sums around a near point lose no digits
        parts = [values.sum(), _count(values), apart.sum(0), apart.square().sum(0)]
        total, count, first, second = self._sums(parts)
        return total / count, (around + first / count, _std(first, second, count) if count > 1 else None)

    def average(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        found = [g for g in grads if g is not None]
        if not found:
            return grads
        flat = self._reduce(torch.cat([g.flatten() for g in found])) / self.size
        parts = iter(flat.split([g.numel() for g in found]))
        return [None if g is None else next(parts).view_as(g).to(g.dtype) for g in grads]

    def all(self, true: Tensor | bool) -> bool:
        return self.total([float(not true)])[0] == 0

    def total(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(self._numbers(numbers)).tolist()

    def most(self, number: float) -> float:
        return self._reduce(self._numbers([number]), dist.ReduceOp.MAX).item()

    def draw(self, n: int, draw: Callable[[int], Tensor]) -> Tensor | None:
        counts = [0.0] * self.size
        counts[self.rank] = n
        counts = self.total(counts)
        before = int(sum(counts[: self.rank]))
        return draw(int(sum(counts)))[before : before + n] if sum(counts) else None

    def gather(self, items: list[Any]) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._answered():
            dist.all_gather_object(found, items, group=self.group)
        return [item for part in found for item in part]

    def tell(self, what: Callable[[], Any]) -> Any:
        """What the first rank finds; where it fails, all do."""
        found: list[Any] = [None, None]
        if self.first:
            try:
                found = [what(), None]
            except Exception as error:
                found = [None, error]
        with self._answered():
            dist.broadcast_object_list(found, group=self.group, group_src=0)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def agree(self, what: str, value: Any) -> None:
        found = self.gather([value])
        if any(other != found[0] for other in found):
            odd = [rank for rank, other in enumerate(found) if other != found[0]]
            raise ValueError(f"rank {', '.join(map(str, odd))}: not the {what} of rank 0; start all ranks alike")

    def _sums(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each summed over ranks, all in one message."""
        flat = _Sum.apply(torch.cat([part.reshape(-1) for part in parts]), self)
        sums = flat.split([part.numel() for part in parts])
        return [s.view_as(part) for s, part in zip(sums, parts, strict=True)]

    def _numbers(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _reduce(self, t: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """t itself, reduced over ranks in place: the one place where tensors are sent."""
        self.messages += 1
        self.bytes += t.numel() * t.element_size()
        with self._answered():
            dist.all_reduce(t, how, group=self.group)
        return t

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistBackendError and its like are RuntimeErrors
            raise RankError(
                f"rank {self.rank} of {self.size} got no answer: another rank has died, hangs, or has failed (see its "
                f"own message). What is finished is kept; start all ranks again. The backend says: {error}"
            ) from error


def ranks_of(group: dist.ProcessGroup | None) -> Alone:
    """The ranks of a group; for None, the one process that this is."""
    return ALONE if group is None else Ranks(group)


class _Sum(torch.autograd.Function):
    """The sum over ranks, in one message; its gradient, which all ranks know, comes back K times (see the head)."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        return ranks._reduce(flat.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.size * grad, None


def moments(features: Tensor) -> Moments:
    """Mean and unbiased std (D,) of features (n, D)."""
    return features.mean(0), features.std(0) if len(features) > 1 else None


def _count(values: Tensor) -> Tensor:
    return values.new_tensor(len(values))


def _std(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """The unbiased standard deviation from sums around a point; 0, and no gradient, where it drowns in rounding."""
    var = (squares - total.square() / count) / (count - 1)
    sound = var > torch.finfo(var.dtype).eps * squares
    return torch.where(sound, var, 1).sqrt() * sound


def share(rows: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows of a batch: those of all ranks, one after another, are the batch, and differ by one at most."""
    return rows.tensor_split(size)[rank]


def started_together() -> bool:
    """Whether torchrun, or another that sets its variables, has started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str, timeout: float = TIMEOUT) -> Iterator[dist.ProcessGroup | None]:
    """The group of all ranks, NCCL for GPUs and gloo for CPUs, as long as the block lasts; None for one process.

    With torch's own variables in place (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK), as torchrun sets
    them. Rank i of a machine takes its GPU i.
    """
    if not started_together():
        yield None
        return
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.device(device).type == "cuda":
        if torch.device(device).index is not None:
            raise ValueError(f"each rank has a GPU of its own: --device cuda, not {device}")
        mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(mine)
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a timeout kills without a word of ours
        options = {"backend": "nccl", "device_id": mine}
    dist.init_process_group(timeout=timedelta(seconds=timeout), **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
