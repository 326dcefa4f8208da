"""NoAdapt: the source model as it is; what every other method must beat."""

from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.methods.registry import register


@register("noadapt", mgtta={})
class NoAdapt(ObjectiveMethod):
    """The source model as it is."""

    reads_features = False
