"""MGTTA+'s answer on a GPU, by few kernels: for one image, dozens of small operations would take as long as half a
forward pass.

The plain versions, which say what is computed, are `mgtta.methods._neighbours` and `mgtta.methods._class_mix`; a
compiler fuses these by itself.

Shapes: n images in v views; M images that are known, those of the batch last; K features of the early layer, the keys;
d features that the head reads, the values; C classes; r directions of the map from classes to features.
"""

import torch
from torch import Tensor

from mgtta._lib.triton import tl, triton

COLUMNS = 16  # that a program reduces over all rows
CLASSES = 8  # that a program of the head computes
MOST_IMAGES = 256  # of a batch


def has_answer_kernels(logits: Tensor) -> bool:
    """Return whether the functions of this file take such a batch here: on a GPU, and not while a compiler traces."""
    if not logits.is_cuda or triton is None or torch.compiler.is_compiling():
        return False
    return logits.dtype == torch.float32 and 0 < len(logits) <= MOST_IMAGES


def join(
    remembered: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys (M, K), values (M, d) and 1 for each image, or 0 (M,): what is remembered, and then a batch.

    Args:
        keys, values: of all views, (v n, K) and (v n, d), of which the mean over views is taken.
    """
    old_keys, old_values, known = remembered
    memory = len(known)
    found = (
        old_keys.new_empty(memory + n, old_keys.shape[1]),
        old_values.new_empty(memory + n, old_values.shape[1]),
        known.new_empty(memory + n),
    )
    keys = _rows(keys)
    values = _rows(values)
    sizes = {"K": keys.shape[1], "D": values.shape[1], "MEMORY": memory, "VIEWS": len(keys) // n}
    blocks = {"KEYS": triton.next_power_of_2(sizes["K"]), "VALUES": triton.next_power_of_2(sizes["D"])}
    _join_kernel[(memory + n,)](
        old_keys, old_values, known, keys, values, *found, n, keys.stride(0), values.stride(0), **sizes, **blocks
    )
    return found


def moved_to(
    keys: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    mu: Tensor,
    moved: Tensor | None,
    n: int,
    constants: tuple[float, float, float, float],
) -> Tensor:
    """Return how far each image's features are to be moved back (n, d): mu + moved - m_i.

    Args:
        keys: of all views, (v n, K).
        known: what `join` gave.
        mu: the source's mean of the values.
        moved: how far classes move it; None: not at all.
        constants: ALIKE, FADING, PRIOR_IMAGES and LEAST_STD of the neighbours.
    """
    all_keys, all_values, there = known
    alike, fading, prior, least = constants
    keys = _rows(keys)
    count, width = all_keys.shape
    rows = triton.next_power_of_2(count)
    per_std = all_keys.new_empty(width)
    _spread_kernel[(triton.cdiv(width, COLUMNS),)](all_keys, there, per_std, count, least, K=width, M=rows, B=COLUMNS)
    weight = all_keys.new_empty(n, count)
    views = len(keys) // n
    block = triton.next_power_of_2(width)
    _weight_kernel[(count, n)](
        all_keys, there, per_std, keys, weight, n, count, keys.stride(0), alike, fading, K=width, VIEWS=views, B=block
    )
    d = all_values.shape[1]
    direction = all_values.new_empty(n, d)
    has_moved = moved is not None
    _direction_kernel[(triton.cdiv(d, COLUMNS), n)](
        all_values,
        weight,
        mu,
        mu if moved is None else moved,
        direction,
        count,
        prior,
        has_moved,
        D=d,
        M=rows,
        B=COLUMNS,
    )
    return direction


def remember(known: tuple[Tensor, Tensor, Tensor], remembered: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep the last images of what is known."""
    memory = len(remembered[2])
    first = len(known[2]) - memory
    widths = [t.shape[1] for t in known[:2]]
    blocks = {"KEYS": triton.next_power_of_2(widths[0]), "VALUES": triton.next_power_of_2(widths[1])}
    _remember_kernel[(memory,)](*known, *remembered, first, K=widths[0], D=widths[1], **blocks)


def mixed(
    p: Tensor,
    means: tuple[Tensor, Tensor, Tensor],
    down: Tensor,
    up: Tensor,
    observe: bool,
    constants: tuple[float, float],
) -> Tensor:
    """Return how far the classes of the last images move what the head reads (d,).

    Args:
        p: predicted probabilities (n, C); an image's are all finite, or none is.
        means: recent (C,), usual (C,) and images () of mgtta.methods._class_mix; updated in place if `observe`.
        down, up: the map from classes to features, (C, r) and (r, d).
        constants: RECENT_IMAGES and USUAL_IMAGES.
    """
    recent, usual, images = means
    n, classes = p.shape
    change = torch.empty_like(recent)
    later = torch.empty_like(images)
    rows = triton.next_power_of_2(n)
    recent_images, usual_images = constants
    _mix_kernel[(triton.cdiv(classes, COLUMNS),)](
        p, recent, usual, images, change, later, n, classes, recent_images, usual_images, observe, N=rows, B=COLUMNS
    )
    rank, d = up.shape
    moved = up.new_empty(d)
    blocks = {"R": triton.next_power_of_2(rank), "B": COLUMNS, "CLASSES": 256, "num_warps": 8}
    strides = (down.stride(0), down.stride(1), up.stride(0), up.stride(1))
    _map_kernel[(triton.cdiv(d, COLUMNS),)](
        change, down, up, moved, images, later, classes, rank, *strides, observe, D=d, **blocks
    )
    return moved


def add_through_head(logits: Tensor, direction: Tensor, weight: Tensor, classes: Tensor | None, share: float) -> Tensor:
    """Return logits (n, C) + share * direction (n, d) times the head's weight, of all classes or those that are given.

    Args:
        weight: (all classes, d), in any dtype.
    """
    n, count = logits.shape
    d = weight.shape[1]
    found = torch.empty_like(logits, memory_format=torch.contiguous_format)
    chosen = weight if classes is None else classes  # any tensor, if it is not read
    _head_kernel[(triton.cdiv(count, CLASSES),)](
        logits.contiguous(),
        direction,
        weight,
        chosen,
        found,
        n,
        count,
        share,
        weight.stride(0),
        weight.stride(1),
        classes is not None,
        D=d,
        B=triton.next_power_of_2(d),
        CLASSES=CLASSES,
    )
    return found


def _rows(t: Tensor) -> Tensor:
    """Return a tensor whose rows lie in one piece each."""
    return t if t.stride(-1) == 1 else t.contiguous()


if triton is not None:

    @triton.jit
    def _join_kernel(
        old_keys,
        old_values,
        known,
        new_keys,
        new_values,
        keys,
        values,
        there,
        n,
        key_stride,
        value_stride,
        K: tl.constexpr,
        D: tl.constexpr,
        MEMORY: tl.constexpr,
        VIEWS: tl.constexpr,
        KEYS: tl.constexpr,
        VALUES: tl.constexpr,
    ):
        row = tl.program_id(0)
        old = row < MEMORY
        i = row - MEMORY
        kc = tl.arange(0, KEYS)
        dc = tl.arange(0, VALUES)
        k = tl.load(old_keys + row * K + kc, mask=(kc < K) & old, other=0.0)
        v = tl.load(old_values + row * D + dc, mask=(dc < D) & old, other=0.0)
        for view in tl.static_range(VIEWS):
            at = view * n + i
            k += tl.load(new_keys + at * key_stride + kc, mask=(kc < K) & (i >= 0), other=0.0).to(tl.float32) / VIEWS
            v += (
                tl.load(new_values + at * value_stride + dc, mask=(dc < D) & (i >= 0), other=0.0).to(tl.float32) / VIEWS
            )
        bad = tl.sum(tl.where(tl.abs(k) < float("inf"), 0, 1), 0) + tl.sum(tl.where(tl.abs(v) < float("inf"), 0, 1), 0)
        sound = bad == 0
        tl.store(keys + row * K + kc, tl.where(sound, k, 0.0), mask=kc < K)
        tl.store(values + row * D + dc, tl.where(sound, v, 0.0), mask=dc < D)
        before = tl.load(known + row, mask=old, other=0.0)
        tl.store(there + row, tl.where(old, before, tl.where(sound, 1.0, 0.0)))

    @triton.jit
    def _spread_kernel(keys, there, per_std, count, least, K: tl.constexpr, M: tl.constexpr, B: tl.constexpr):
        rows = tl.arange(0, M)
        columns = tl.program_id(0) * B + tl.arange(0, B)
        t = tl.load(there + rows, mask=rows < count, other=0.0)
        inside = (rows[:, None] < count) & (columns[None, :] < K)
        k = tl.load(keys + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
        images = tl.maximum(tl.sum(t, 0), 1.0)
        centre = tl.sum(t[:, None] * k, 0) / images
        away = k - centre[None, :]
        variance = tl.sum(t[:, None] * away * away, 0) / images
        tl.store(per_std + columns, 1.0 / (tl.sqrt(variance) + least), mask=columns < K)

    @triton.jit
    def _weight_kernel(
        keys,
        there,
        per_std,
        own,
        weight,
        n,
        count,
        stride,
        alike,
        fading,
        K: tl.constexpr,
        VIEWS: tl.constexpr,
        B: tl.constexpr,
    ):
        j = tl.program_id(0)
        i = tl.program_id(1)
        columns = tl.arange(0, B)
        inside = columns < K
        mine = tl.zeros((B,), dtype=tl.float32)
        for view in tl.static_range(VIEWS):
            mine += tl.load(own + (view * n + i) * stride + columns, mask=inside, other=0.0).to(tl.float32) / VIEWS
        other = tl.load(keys + j * K + columns, mask=inside, other=0.0)
        apart = (mine - other) * tl.load(per_std + columns, mask=inside, other=0.0)
        beyond = tl.sum(apart * apart, 0) / K - alike
        beyond = tl.where(beyond < 0, 0.0, beyond)  # what is not a number stays so
        tl.store(weight + i * count + j, tl.load(there + j) * tl.exp(-beyond / fading))

    @triton.jit
    def _direction_kernel(
        values,
        weight,
        mu,
        moved,
        direction,
        count,
        prior,
        has_moved: tl.constexpr,
        D: tl.constexpr,
        M: tl.constexpr,
        B: tl.constexpr,
    ):
        i = tl.program_id(1)
        rows = tl.arange(0, M)
        columns = tl.program_id(0) * B + tl.arange(0, B)
        w = tl.load(weight + i * count + rows, mask=rows < count, other=0.0)
        inside = (rows[:, None] < count) & (columns[None, :] < D)
        v = tl.load(values + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)
        centre = tl.load(mu + columns, mask=columns < D, other=0.0)
        mean = (prior * centre + tl.sum(w[:, None] * v, 0)) / (prior + tl.sum(w, 0))
        found = centre - mean
        if has_moved:
            found += tl.load(moved + columns, mask=columns < D, other=0.0)
        tl.store(direction + i * D + columns, found, mask=columns < D)

    @triton.jit
    def _remember_kernel(
        keys,
        values,
        there,
        own_keys,
        own_values,
        known,
        first,
        K: tl.constexpr,
        D: tl.constexpr,
        KEYS: tl.constexpr,
        VALUES: tl.constexpr,
    ):
        row = tl.program_id(0)
        kc = tl.arange(0, KEYS)
        dc = tl.arange(0, VALUES)
        tl.store(own_keys + row * K + kc, tl.load(keys + (first + row) * K + kc, mask=kc < K), mask=kc < K)
        tl.store(own_values + row * D + dc, tl.load(values + (first + row) * D + dc, mask=dc < D), mask=dc < D)
        tl.store(known + row, tl.load(there + first + row))

    @triton.jit
    def _mix_kernel(
        p,
        recent,
        usual,
        images,
        change,
        later,
        n,
        classes,
        recent_images,
        usual_images,
        observe: tl.constexpr,
        N: tl.constexpr,
        B: tl.constexpr,
    ):
        rows = tl.arange(0, N)
        columns = tl.program_id(0) * B + tl.arange(0, B)
        inside = columns < classes
        found = tl.load(
            p + rows[:, None] * classes + columns[None, :], mask=(rows[:, None] < n) & inside[None, :], other=0.0
        )
        first = tl.load(p + rows * classes, mask=rows < n, other=float("inf"))  # as finite as the others of its image
        count = tl.sum(tl.where(first < float("inf"), 1.0, 0.0), 0)
        mean = tl.sum(tl.where(found < float("inf"), found, 0.0), 0) / tl.maximum(count, 1.0)
        now = tl.minimum(tl.load(images) + count, usual_images)
        share = tl.minimum(count / now, 1.0)
        soon = 1.0 - tl.exp2(count * tl.log2(1.0 - 1.0 / recent_images))
        lately = tl.load(recent + columns, mask=inside, other=0.0)
        before = tl.load(usual + columns, mask=inside, other=0.0)
        lately += soon * (mean - lately)
        before += share * (mean - before)
        tl.store(change + columns, lately - before, mask=inside)
        if observe:
            tl.store(recent + columns, lately, mask=inside)
            tl.store(usual + columns, before, mask=inside)
            tl.store(later, now, mask=tl.program_id(0) == 0)

    @triton.jit
    def _map_kernel(
        change,
        down,
        up,
        moved,
        images,
        later,
        classes,
        rank,
        down_row,
        down_column,
        up_row,
        up_column,
        observe: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        B: tl.constexpr,
        CLASSES: tl.constexpr,
    ):
        ranks = tl.arange(0, R)
        columns = tl.program_id(0) * B + tl.arange(0, B)
        along = tl.zeros((R,), dtype=tl.float32)
        for start in range(0, classes, CLASSES):
            some = start + tl.arange(0, CLASSES)
            c = tl.load(change + some, mask=some < classes, other=0.0)
            inside = (some[:, None] < classes) & (ranks[None, :] < rank)
            at = some[:, None] * down_row + ranks[None, :] * down_column
            along += tl.sum(c[:, None] * tl.load(down + at, mask=inside, other=0.0), 0)
        inside = (ranks[:, None] < rank) & (columns[None, :] < D)
        found = tl.load(up + ranks[:, None] * up_row + columns[None, :] * up_column, mask=inside, other=0.0)
        tl.store(moved + columns, tl.sum(along[:, None] * found, 0), mask=columns < D)
        if observe:
            tl.store(images, tl.load(later), mask=tl.program_id(0) == 0)

    @triton.jit
    def _head_kernel(
        logits,
        direction,
        weight,
        chosen,
        out,
        n,
        count,
        share,
        row_stride,
        column_stride,
        chooses: tl.constexpr,
        D: tl.constexpr,
        B: tl.constexpr,
        CLASSES: tl.constexpr,
    ):
        c = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
        columns = tl.arange(0, B)
        if chooses:  # noqa: SIM108 - a constant when the kernel is compiled
            at = tl.load(chosen + c, mask=c < count, other=0)
        else:
            at = c
        inside = (c[:, None] < count) & (columns[None, :] < D)
        w = tl.load(weight + at[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0)
        w = w.to(tl.float32)
        for i in range(n):
            move = tl.load(direction + i * D + columns, mask=columns < D, other=0.0)
            z = tl.load(logits + i * count + c, mask=c < count, other=0.0)
            tl.store(out + i * count + c, z + share * tl.sum(w * move[None, :], 1), mask=c < count)
