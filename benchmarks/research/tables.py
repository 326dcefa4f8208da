"""The research log's tables, from the results."""

import dataclasses
import statistics

from pages import table
from stages import (
    CHANGES,
    DECAYS,
    EQ7,
    RICH,
    TIME,
    Results,
    adam_trials,
    best,
    combined,
    contenders,
    learned_trials,
    paper_trials,
    plus,
    trainings,
)
from tasks import Objective, Training, key, short


def page(results: Results) -> str:
    """The log's tables: each piece of the objective by itself and together, every generator, and the test."""
    reference = results[key(best(adam_trials(decays=DECAYS), results))]["mean"]
    rows = [["objective, with Adam", "validation, %", "against Eq. 7"], ["Eq. 7", f"{reference:.2f}", ""]]
    tried = [*(Objective(**change) for change in CHANGES), *dict.fromkeys(t.objective for t in combined(results))]
    for objective in tried:
        mean = results[key(best(adam_trials(objective), results))]["mean"]
        rows.append([short(objective), f"{mean:.2f}", f"{mean - reference:+.2f}"])
    pieces = rows
    rows = [["objective", "rule", "its training", "validation, %", "learning rate", "decay"]]
    for name, objective in (("Eq. 7", EQ7), ("plus", plus(results))):
        groups = {"Adam": adam_trials(objective, DECAYS), "the paper's generator": paper_trials(objective)}
        own = [t for t in trainings(results) if t.objective == objective]
        groups |= {_described(t): learned_trials(t) for t in own}
        for what, trials in groups.items():
            trial = best(trials, results)
            rule, _, training = what.partition(": ")
            found = f"{results[key(trial)]['mean']:.2f}"
            rows.append([name, rule, training, found, f"{trial.rule.lr:g}", f"{trial.rule.decay:g}"])
    generators_ = rows
    rows = [["contender", "whole stream", "10 updates, then frozen"]]
    for name, trial in contenders(results).items():
        cells = []
        for updates in (None, 10):
            trials = [dataclasses.replace(trial, split="test", seed=s, max_updates=updates) for s in range(3)]
            found = [results[key(t)]["mean"] for t in trials if key(t) in results]
            cells.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}" if len(found) == 3 else "")
        if any(cells):
            rows.append([name, *cells])
    return "\n\n".join(table(head, below) for head, *below in (pieces, generators_, rows))


def _described(training: Training) -> str:
    inputs = {Training.inputs: "two inputs", TIME: "two and time", RICH: "nine inputs"}[training.inputs]
    rest = short(dataclasses.replace(training, inputs=Training.inputs, objective=EQ7))
    return f"ours, {inputs}: {rest or 'greedy'}"
