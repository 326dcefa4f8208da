"""The paper's experiments as cells.

An experiment is a function Options -> list[Cell]. Cells that ask for the same work have the same key, whichever
experiment asks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mgtta._lib.errors import unknown
from mgtta._lib.shipped import shipped
from mgtta.bench.cells import STILL, SWEEP, Cell, Options, Setup, Training
from mgtta.bench.needs import rate_at, registered_name, takes_trade_off
from mgtta.bench.streams import streams
from mgtta.bench.sweep import rates
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.datasets import KINDS

__all__ = ["EXPERIMENTS", "QUICK", "Cell", "Options", "Setup", "Training", "experiment_cells", "variant"]

UPDATES = (1, 2, 5, 10, 20, 35, 50, 75, 100, 200)
LIMITED = {"mgtta": (20, 50, 100)}  # Table 5 runs these with fewer updates, too
TRADE_OFF = {"imagenet-r": 0.2}  # the paper's lambda, where it is not the recipes'

# what --quick changes
QUICK: dict[str, Any] = {
    "batch_size": 16,
    "corruptions": ("gaussian_noise", "contrast"),
    "seconds": (0.2, 1.0),
    "samples": (8, 16, 32, 64),
    "sizes": (2, 8, 16),
    "rates": (0.1, 1.0, 10.0),
    "training": Training(images=16, steps=16, judges=16),
    "rounds": 2,
    "single": 16,
}


def corruptions(o: Options) -> list[Cell]:
    """Table 1: fifteen corruptions, reset before each."""
    return _cells("corruptions", o, _corrupted(o.corruptions))


def budgets(o: Options) -> list[Cell]:
    """Table 2: the method learns for a number of batches or seconds; then the model only predicts."""
    limits: list[dict[str, Any]] = [{"max_updates": k} for k in o.below(UPDATES)]
    limits += [{"max_seconds": s} for s in o.seconds]
    return [cell for limit in [*limits, {}] for cell in _cells("budgets", o, _corrupted(o.corruptions), **limit)]


def variants(o: Options) -> list[Cell]:
    """Table 3: -R, -Sketch, -A, or any images, as they are."""
    if not o.variants:
        raise ValueError("name the data sets: --variant imagenet-r=FOLDER --variant imagenet-sketch=FOLDER ...")
    return _cells("variants", o, _named(o.variants))


def ablation(o: Options) -> list[Cell]:
    """Table 4: the generator; an LSTM in place of its memory; SGD and Adam in place of the generator.

    A shipped generator has a shipped twin with an LSTM. For any other generator, the LSTM is trained.
    """
    streams = [*_corrupted(o.corruptions), *_named(o.variants)]
    lstm = None
    if f"{o.generator}-lstm" not in shipped("generators"):
        lstm = dataclasses.replace(o.training, memory="lstm")
    return [
        *_cells("ablation", o, streams, ["mgtta", "eq7_sgd", "eq7_adam"]),
        *_cells("ablation", o, streams, ["mgtta_lstm"], training=lstm),
    ]


def runtime(o: Options) -> list[Cell]:
    """Table 5: one method at a time, each in a process of its own; MGTTA with fewer updates, too."""
    return _alone("runtime", o)


def samples(o: Options) -> list[Cell]:
    """Table 6: generators trained on different numbers of images."""
    return _trained("samples", o, [dataclasses.replace(o.training, images=n) for n in o.samples])


def mixed(o: Options) -> list[Cell]:
    """Table 7: fifteen corruptions mixed within each batch."""
    return _cells("mixed", o, [{"domains": tuple(o.corruptions)}], mixed=True)


def small_batch(o: Options) -> list[Cell]:
    """Table 8: batch sizes 2 and 4; each method at the learning rate that its authors' rule gives for them.

    The rules are for ViTs: lr * B / 64, doubled for single images by SAR and DeYO; a tenth in MGTTA's paper.
    """
    cells = [cell for size in (2, 4) for cell in _cells("small-batch", o, _corrupted(o.corruptions), batch_size=size)]
    return [_at_its_batch_size(cell) for cell in cells]


def _at_its_batch_size(cell: Cell) -> Cell:
    rate = rate_at(cell.method, cell.batch_size)
    if rate is None:
        return cell
    return dataclasses.replace(cell, settings=(("lr", rate),))


def memory(o: Options) -> list[Cell]:
    """Appendix C.1: the work of `runtime`, reported for its memory."""
    return _alone("memory", o)


def hidden_size(o: Options) -> list[Cell]:
    """Appendix C.2: generators of several sizes."""
    return _trained("hidden-size", o, [dataclasses.replace(o.training, hidden_size=d) for d in o.sizes])


def learning_rate(o: Options) -> list[Cell]:
    """Appendix C.3: every method at the rates of a sweep, on the test stream: to compare, not to choose."""
    return [
        dataclasses.replace(cell, settings=(("lr", rate),))
        for cell in _cells("learning-rate", o, _corrupted(o.corruptions))
        for rate in rates(cell.method, o.rates)
    ]


def convergence(o: Options) -> list[Cell]:
    """Figure 3: the model is frozen after a number of updates; `remaining` is its accuracy on the images after it."""
    streams = [*_corrupted(o.corruptions), *_named(o.variants[:1])]
    return [cell for k in (0, *o.below(UPDATES)) for cell in _cells("convergence", o, streams, max_updates=k)]


def continual(o: Options) -> list[Cell]:
    """Fifteen corruptions one after another, never reset."""
    return _cells("continual", o, [{"domains": tuple(o.corruptions)}], reset="never")


def everything(o: Options) -> list[Cell]:
    """All experiments; the variants only if some are named."""
    skipped = {everything} if o.variants else {everything, variants}
    return [cell for make in EXPERIMENTS.values() if make not in skipped for cell in make(o)]


EXPERIMENTS: dict[str, Callable[[Options], list[Cell]]] = {
    "corruptions": corruptions,
    "budgets": budgets,
    "variants": variants,
    "ablation": ablation,
    "runtime": runtime,
    "samples": samples,
    "mixed": mixed,
    "small-batch": small_batch,
    "memory": memory,
    "hidden-size": hidden_size,
    "learning-rate": learning_rate,
    "convergence": convergence,
    "continual": continual,
    "streams": streams,
    "all": everything,
}


def experiment_cells(name: str, options: Options) -> list[Cell]:
    """Return the cells of an experiment; an unknown experiment, method or corruption is an error."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    methods = [registered_name(method) for method in options.methods]
    for corruption in options.corruptions:
        if corruption not in (*CORRUPTIONS, *VALIDATION_CORRUPTIONS):
            raise unknown("corruption", corruption, (*CORRUPTIONS, *VALIDATION_CORRUPTIONS))
    limits = [(_limited(named), images) for named, images in options.limits]
    o = dataclasses.replace(options, methods=methods, limits=limits)
    cells = [_within_limits(cell, o) for cell in EXPERIMENTS[name](o) if o.limit(cell.experiment, cell.method) != 0]
    return list(dict.fromkeys([*cells, *_still_beside(cells)]))


def _still_beside(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells of the methods that never learn, on as few images as methods that have fewer than these."""
    still = {cell.method: cell.limit for cell in cells if cell.method in STILL}
    return [
        dataclasses.replace(cell, method=method, settings=(), training=None)
        for method, limit in still.items()
        for cell in cells
        if cell.limit != limit and cell.kind is None
    ]


def _limited(name: str) -> str:
    """Return the name of an experiment, the sweep or a method, or EXPERIMENT/METHOD, whose images are limited."""
    if name in EXPERIMENTS or name == SWEEP:
        return name
    experiment, slash, method = name.rpartition("/")
    if slash and experiment not in (*EXPERIMENTS, SWEEP):
        raise unknown("experiment", experiment, (*EXPERIMENTS, SWEEP))
    return f"{experiment}{slash}{registered_name(method)}"


def _within_limits(cell: Cell, o: Options) -> Cell:
    limits = (cell.limit, o.limit(cell.experiment, cell.method))
    return dataclasses.replace(cell, limit=min(filter(None, limits), default=None))


def variant(text: str) -> tuple[str, str]:
    """Return name and images of NAME=IMAGES; "r", "sketch" and "a" are ImageNet's."""
    name, equals, images = text.partition("=")
    if not (name and equals and images):
        raise ValueError(f"--variant takes NAME=IMAGES, such as imagenet-r=FOLDER, not {text!r}")
    full = f"imagenet-{name.lower()}"
    if full in KINDS:
        name = full
    return name, images


# --- building blocks: a stream is a dict of a cell's fields


def _corrupted(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"domains": (name,)} for name in names]


def _named(sets: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"domains": (name,), "data": images, "severity": 0} for name, images in sets]


def _cells(
    experiment: str, o: Options, streams: Sequence[dict[str, Any]], methods: Sequence[str] = (), **more: Any
) -> list[Cell]:
    found = []
    for stream in streams:
        fields = {"batch_size": o.batch_size, **stream, **more}
        for seed in range(o.seeds):
            for method in methods or o.methods:
                settings = _paper_settings(method, stream["domains"][0])
                found.append(Cell(experiment, method, seed=seed, settings=settings, **fields))
    return found


def _paper_settings(method: str, domain: str) -> tuple[tuple[str, Any], ...]:
    if domain in TRADE_OFF and takes_trade_off(method):
        return (("trade_off", TRADE_OFF[domain]),)
    return ()


def _trained(experiment: str, o: Options, trainings: Sequence[Training]) -> list[Cell]:
    """Return cells of MGTTA with each generator, on the corruptions and, as the paper adds -R, the first data set."""
    streams = [*_corrupted(o.corruptions), *_named(o.variants[:1])]
    return [cell for training in trainings for cell in _cells(experiment, o, streams, ["mgtta"], training=training)]


def _alone(experiment: str, o: Options) -> list[Cell]:
    stream = {"domains": tuple(o.corruptions), "alone": True}
    found = _cells(experiment, o, [stream])
    for method in o.methods:
        for k in o.below(LIMITED.get(method, ())):
            found += _cells(experiment, o, [stream], [method], max_updates=k)
    return found
