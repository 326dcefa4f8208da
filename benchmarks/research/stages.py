"""Stages: each a function of the results so far, which chooses from them what to do next."""

import dataclasses
import itertools
import math
from functools import partial
from typing import Any

from laboratory import PAPER
from tasks import Objective, Rule, Training, Trial, key

Results = dict[str, dict[str, Any]]  # by key
LRS = (5e-3, 1e-2, 2e-2)
DECAYS = (math.inf, 5.0, 15.0)
EQ7 = Objective()
TIME = ("momentum", "gradient", "time", "late")
RICH = ("momentum", "gradient", "slow", "magnitude", "time", "late", "kind", "depth", "travel")
CHANGES: list[dict[str, Any]] = [
    {"trade_off": 0.8},
    {"recentre": 1.0},
    {"align": 0.5, "align_tokens": "class"},
    {"mirror": True},
    *({"noisy": v} for v in (0.3, 1.0)),
    *({"steps": v} for v in (2, 3)),
    {"adapts": "biases"},
]
FIRST_CHANGES: list[dict[str, Any]] = [  # tried before, none of which paid: docs/research.md
    *({"trade_off": v} for v in (0.1, 0.2, 0.8, 1.6, 3.2)),
    *({"tokens": "patch", "trade_off": v} for v in (0.1, 0.4, 1.6)),
    *({"tokens": "both", "patch_weight": v} for v in (0.25, 1.0, 4.0)),
    *({"history": v} for v in (0.5, 0.8)),
    *({"margin": v} for v in (0.4, 0.6, 0.8)),
    *({"entropy_weight": v} for v in (0.0, 0.5, 2.0)),
    *({"balance": v} for v in (0.1, 0.3, 1.0)),
    *({"recentre": v} for v in (0.5, 1.0)),
    {"late": True},
]


def best(trials: list[Trial], results: Results) -> Trial:
    return max(trials, key=lambda trial: results[key(trial)]["mean"])


def adam_trials(objective: Objective = EQ7, decays: tuple[float, ...] = (math.inf,)) -> list[Trial]:
    lrs = LRS if objective == EQ7 or len(decays) > 1 else LRS[:2]
    return [Trial(Rule(lr=lr, decay=decay), objective) for decay in decays for lr in lrs]


def objectives(_: Results) -> list[Trial]:
    """Try objectives, with Adam, one piece changed at a time."""
    return [*adam_trials(decays=DECAYS), *(trial for change in CHANGES for trial in adam_trials(Objective(**change)))]


def first_objectives(_: Results) -> list[Trial]:
    """What was tried first."""
    return [Trial(Rule(lr=lr, decay=5.0), Objective(**change)) for change in FIRST_CHANGES for lr in LRS]


def combined(results: Results) -> list[Trial]:
    """Try together the pieces that helped: the best value of each, added in the order of their gain."""
    base = results[key(best(adam_trials(decays=DECAYS), results))]["mean"]
    gains: dict[str, tuple[float, dict[str, Any]]] = {}
    for change in CHANGES:
        gain = results[key(best(adam_trials(Objective(**change)), results))]["mean"] - base
        piece = next(iter(change))
        if gain > max(0.1, gains.get(piece, (0.0,))[0]):
            gains[piece] = gain, change
    ordered = [change for _, change in sorted(gains.values(), key=lambda pair: -pair[0])]
    sums = [{k: v for change in ordered[: n + 1] for k, v in change.items()} for n in range(1, len(ordered))]
    pairs = [{**ordered[0], **change} for change in ordered[2:]]
    return [trial for change in [*sums, *pairs] for trial in adam_trials(Objective(**change))]


def plus(results: Results) -> Objective:
    """Return the best objective so far."""
    return best([*objectives(results), *combined(results)], results).objective


def trainings(results: Results) -> list[Training]:
    """How to train a generator, one piece changed at a time; then the same for the best objective."""
    twin = partial(Training, outer="twin", unroll=4)
    own = partial(twin, objective=plus(results))
    return [
        Training(),
        twin(),
        twin(inputs=TIME),
        twin(inputs=RICH),
        twin(inputs=RICH, lr=1e-2),
        twin(inputs=RICH, hidden_size=16),
        twin(inputs=RICH, unroll=8),
        twin(inputs=RICH, batch=(4, 16, 64)),
        own(),
        own(inputs=TIME),
        own(inputs=RICH),
        own(inputs=RICH, lr=1e-2),
        Training(inputs=RICH),
        *(Training(inputs=inputs, objective=plus(results)) for inputs in (Training.inputs, RICH)),
        Training(inputs=RICH, objective=plus(results), lr=1e-2),
    ]


def learned_trials(training: Training) -> list[Trial]:
    rules = itertools.product((0.5, 1.0, 2.0), (math.inf, 10.0))
    return [
        Trial(Rule("learned", lr=training.lr * factor, decay=decay, generator=key(training)), training.objective)
        for factor, decay in rules
    ]


def paper_trials(objective: Objective) -> list[Trial]:
    rules = itertools.product(LRS, DECAYS)
    return [Trial(Rule("learned", lr=lr, decay=decay, generator=PAPER), objective) for lr, decay in rules]


def generators(results: Results) -> list[Trial]:
    """Every generator, and Adam on the best objective, at several rates and decays."""
    own = [trial for training in trainings(results) for trial in learned_trials(training)]
    hand_made = adam_trials(plus(results), DECAYS)
    return [*own, *paper_trials(EQ7), *paper_trials(plus(results)), *hand_made]


def contenders(results: Results) -> dict[str, Trial]:
    """Return the finalists: for both objectives Adam, the paper's generator, ours in its form, ours with all inputs."""
    found = {
        "eq7_adam": best(adam_trials(decays=DECAYS), results),
        "plus_adam": best(adam_trials(plus(results), DECAYS), results),
    }
    for name, objective in (("eq7", EQ7), ("plus", plus(results))):
        found[f"{name}_paper"] = best(paper_trials(objective), results)
        own = [t for t in trainings(results) if t.objective == objective]
        for kind, group in (("form", [t for t in own if t.inputs == Training.inputs]), ("best", own)):
            found[f"{name}_{kind}"] = best([trial for t in group for trial in learned_trials(t)], results)
    return found


def test(results: Results) -> list[Trial]:
    """The fifteen corruptions, three seeds; and with ten updates."""
    return [
        dataclasses.replace(trial, split="test", seed=seed, max_updates=updates)
        for updates, seeds in ((None, 3), (10, 3))
        for seed in range(seeds)
        for trial in contenders(results).values()
    ]


SETTINGS: list[dict[str, Any]] = [
    {"setting": "mixed"},
    {"setting": "continual"},
    {"batch": 2, "images": 256},
    {"batch": 4, "images": 256},
]


def rates(trial: Trial, setting: dict[str, Any]) -> list[Trial]:
    """A contender in another setting, at rates that fit it, without decay: such streams have no end."""
    factors = (0.02, 0.05, 0.1, 0.3) if "batch" in setting else (0.1, 0.2, 0.5, 1.0)
    rules = [dataclasses.replace(trial.rule, lr=trial.rule.lr * f, decay=math.inf) for f in factors]
    return [dataclasses.replace(trial, rule=rule, **setting) for rule in rules]


def finalists(results: Results) -> list[Trial]:
    return [contenders(results)[name] for name in ("eq7_adam", "eq7_paper", "eq7_best", "plus_adam", "plus_best")]


def settings(results: Results) -> list[Trial]:
    """Rates for mixed and continual streams and for small batches, on validation."""
    return [t for s in SETTINGS for trial in finalists(results) for t in rates(trial, s)]


def settings_test(results: Results) -> list[Trial]:
    found = [best(rates(trial, s), results) for s in SETTINGS for trial in finalists(results)]
    return [dataclasses.replace(trial, split="test", seed=seed) for seed in range(3) for trial in found]


STAGES = {
    stage.__name__: stage
    for stage in (first_objectives, objectives, combined, trainings, generators, test, settings, settings_test)
}
