"""Options of every method that learns, as `create` applies them: which parameters adapt, pull, gather and recall."""

import copy

from mgtta._lib.names import spelled
from mgtta.adaptation.method import Method
from mgtta.methods._checks import check_number
from mgtta.methods._recipe import Recipe
from mgtta.models.classifier import Classifier
from mgtta.models.norms import Chosen

GUARDED_GATHER = 16  # images that a guarded method learns from together, at least


def or_default(
    chosen: Recipe, pull: float | None, gather: int | None, recall: int | None, guard: bool, ranks: bool
) -> tuple[float | None, int | None, int | None]:
    """Return pull, gather and recall as they were given, or the recipe's own; over ranks there is no recall."""
    own = chosen.options
    if pull is None:
        pull = own.get("pull")
    if gather is None:
        gather = own.get("gather")
    if gather is None and guard and chosen.works_with["gather"]:
        gather = GUARDED_GATHER
    if recall is None and not ranks:
        recall = own.get("recall")
    return pull, gather, recall


def choosing(model: Classifier, params: Chosen | None, chosen: Recipe) -> Classifier:
    """Return the model, or one with the same weights that says which parameters adapt."""
    if params is None:
        return model
    if chosen.descent is None:
        raise ValueError(f"{spelled(chosen.name)} adapts no parameters by an optimizer: leave params out")
    model = copy.copy(model)
    model.adapts = params
    return model


def set_pull(method: Method, pull: float | None) -> None:
    """Set the share of the distance to the source; None leaves the method's own."""
    check_number("pull", pull)
    if pull is None:
        return
    if method.optimizer is None and pull:
        name = spelled(method.name)
        raise ValueError(f"{name} adapts no parameters that pull could draw back to the source: leave pull out")
    if not pull < 1:
        raise ValueError(f"pull is a share of the distance to the source: at least 0 and below 1, not {pull}")
    method.pull = float(pull)
