"""One stream over many processes: statistics of the whole batch for a method that holds a share of it.

Each rank gets its share of every batch. Parameters, moments and memory are the same on all ranks, since they start
equal and change equally; they are never sent. A method computes with its own images and gets from here what depends
on all of them.

Notation    K ranks; s_r the part of a sum from rank r, S = s_1 + ... + s_K; L(S, theta) the loss, equal on every rank

    dL/dtheta = dL/dS (ds_1/dtheta + ... + ds_K/dtheta) + the direct part of theta, such as a penalty

The forward pass of a sum gives S. Its backward pass gives K dL/dS to each s_r, without a message, since every rank
knows dL/dS. The mean of the ranks' gradients is then dL/dtheta: each s_r counts once, and a penalty counts once and
not K times. So a step sends the sums before the backward pass and the gradients after it. One message is not enough:
the gradient of a standard deviation over all images needs that standard deviation first.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = 300.0  # seconds; how long a rank waits for the others
Moments = tuple[Tensor, Tensor | None]  # mean and unbiased std; the std of one image is None


class RankError(RuntimeError):
    """Another rank died, hangs, or does something else."""


class Alone:
    """One process, which holds every image: the same calls as Ranks, without messages."""

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """True on the rank that writes files and messages."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int] | None:
        """This rank's share of every batch, as a stream takes it: (rank, ranks), or None for one process."""
        return None if self.size == 1 else (self.rank, self.size)

    def mean(self, values: Tensor) -> Tensor | None:
        """Return the mean over the images of all ranks, (n, ...) -> (...), differentiable; None without images."""
        return values.mean(0) if len(values) else None

    def moments(self, values: Tensor, features: Tensor, around: Tensor) -> tuple[Tensor, Moments]:
        """Return the mean of `values` (n,) and the moments (D,) of `features` (n, D) over the images of all ranks.

        Both are differentiable.

        Args:
            around: a point (D,) near the features, the same on all ranks.
        """
        return values.mean(), moments(features)

    def average(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the mean over ranks of each gradient."""
        return grads

    def all(self, true: Tensor | bool) -> bool:
        """Return whether `true` holds on every rank."""
        return bool(true)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over ranks."""
        return list(numbers)

    def most(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        return number

    def draw(self, n: int, draw: Callable[[int], Tensor]) -> Tensor | None:
        """Return this rank's n rows of what `draw` returns for the images of all ranks; None without images.

        Random numbers are drawn for the images of all ranks, so that every rank's generator is in the state that it
        would have in one process.
        """
        return draw(n) if n else None

    def rows(self, own: Tensor) -> Tensor:
        """Return the rows (n, D) of all ranks, in the order of the ranks; not differentiable."""
        return own

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all ranks in one list, in the order of the ranks."""
        return items

    def tell(self, what: Callable[[], Any]) -> Any:
        """Return what the first rank computes."""
        return what()

    def agree(self, what: str, value: Any) -> None:
        """Raise an error if a value is not the same on all ranks."""


ALONE = Alone()


class Ranks(Alone):
    """The ranks of a process group; every call is made by all of them, in the same order.

    Attributes:
        messages, bytes: collective operations on tensors so far, and the bytes that this rank sent in them.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the process group that it was given")
        self.device = torch.device("cpu")
        if "nccl" in dist.get_backend(group):
            self.device = torch.device("cuda")
        self.messages = 0
        self.bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a copy of a method stays in the same group

    def mean(self, values: Tensor) -> Tensor | None:
        total, count = self._sums([values.sum(0), _count(values)])
        if not count:
            return None
        return total / count

    def moments(self, values: Tensor, features: Tensor, around: Tensor) -> tuple[Tensor, Moments]:
        apart = features - around  # sums around a near point lose no digits
        parts = [values.sum(), _count(values), apart.sum(0), apart.square().sum(0)]
        total, count, first, second = self._sums(parts)
        mean = around + first / count
        std = _std(first, second, count) if count > 1 else None
        return total / count, (mean, std)

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
        before, total = self._place(n)
        if not total:
            return None
        return draw(total)[before : before + n]

    def rows(self, own: Tensor) -> Tensor:
        before, total = self._place(len(own))
        every = own.new_zeros(total, *own.shape[1:])
        every[before : before + len(own)] = own
        return self._reduce(every)

    def _place(self, n: int) -> tuple[int, int]:
        """Return how many images the ranks before this one have, which has n, and how many all have."""
        counts = [0.0] * self.size
        counts[self.rank] = n
        counts = self.total(counts)
        return int(sum(counts[: self.rank])), int(sum(counts))

    def gather(self, items: list[Any]) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._answered():
            dist.all_gather_object(found, items, group=self.group)
        return [item for part in found for item in part]

    def tell(self, what: Callable[[], Any]) -> Any:
        """Return what the first rank computes; if it raises an error, all ranks raise it."""
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
            raise ValueError(
                f"rank {', '.join(map(str, odd))}: not the {what} of rank 0; start all ranks with the same settings"
            )

    def _sums(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each part summed over ranks; all sums go in one message."""
        flat = _Sum.apply(torch.cat([part.reshape(-1) for part in parts]), self)
        sums = flat.split([part.numel() for part in parts])
        return [s.view_as(part) for s, part in zip(sums, parts, strict=True)]

    def _numbers(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _reduce(self, t: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce t over ranks in place and return it: the one place that sends tensors."""
        self.messages += 1
        self.bytes += t.numel() * t.element_size()
        with self._answered():
            dist.all_reduce(t, how, group=self.group)
        return t

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistBackendError and its siblings
            raise RankError(
                f"rank {self.rank} of {self.size} got no answer: another rank has died, hangs, or has failed (see its "
                f"own message). Finished work is kept; start all ranks again. The backend says: {error}"
            ) from error


def ranks_of(group: dist.ProcessGroup | None) -> Alone:
    """Return the ranks of a group, or ALONE for None."""
    if group is None:
        return ALONE
    return Ranks(group)


class _Sum(torch.autograd.Function):
    """The sum over ranks, in one message; its backward pass multiplies the gradient by K (see the module's head)."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        return ranks._reduce(flat.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.size * grad, None


def moments(features: Tensor) -> Moments:
    """Return mean and unbiased std (D,) of features (n, D); the std of one image is None."""
    std = features.std(0) if len(features) > 1 else None
    return features.mean(0), std


def _count(values: Tensor) -> Tensor:
    return values.new_tensor(len(values))


def _std(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """Return the unbiased standard deviation from sums around a point.

    It is 0, without a gradient, where it is smaller than the rounding errors.
    """
    var = (squares - total.square() / count) / (count - 1)
    sound = var > torch.finfo(var.dtype).eps * squares
    return torch.where(sound, var, 1).sqrt() * sound


def share(rows: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's rows of a batch: the ranks' shares, in order, are the batch, and differ by one row at most."""
    return rows.tensor_split(size)[rank]


def started_together() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str, timeout: float = TIMEOUT) -> Iterator[dist.ProcessGroup | None]:
    """Join the group of all ranks for the block, NCCL for GPUs and gloo for CPUs; yield None for one process.

    torch's own variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK) must be set, as torchrun sets them.
    Rank i of a machine gets its GPU i.
    """
    if not started_together():
        yield None
        return
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.device(device).type == "cuda":
        if torch.device(device).index is not None:
            raise ValueError(f"each rank has its own GPU: --device cuda, not {device}")
        mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(mine)
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a timeout ends the process without our message
        options = {"backend": "nccl", "device_id": mine}
    dist.init_process_group(timeout=timedelta(seconds=timeout), **options)
    try:
        yield dist.group.WORLD
        dist.barrier()  # a rank that leaves earlier than the others may abort at its exit
    finally:
        dist.destroy_process_group()
