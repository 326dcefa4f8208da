"""NoAdapt: the source model as it is; what every other method must beat."""

from mgtta.adaptation.method import Method


class NoAdapt(Method):
    shares_batches = True
    static_step = True
