"""Batch statistics in BatchNorm layers (Nado et al., 2020, arXiv 2006.10963; Schneider et al., NeurIPS 2020).

Notation: (mu_s, var_s) a layer's running statistics, (mu_t, var_t) those of the present batch, n its images,
N the prior strength: how many images the running statistics count for. Schneider's estimate is
mu = N / (N + n) mu_s + n / (N + n) mu_t, and var alike. N = 0 is Nado's: only the batch.
"""

from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.methods.registry import BATCH_NORM, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import batch_norms, with_running_statistics
from mgtta.models.statistics import StreamStatistics

NADO = Paper("Evaluating Prediction-Time Batch Normalization for Robustness under Covariate Shift", "2006.10963")
SCHNEIDER = Paper("Improving robustness against common corruptions by covariate shift adaptation", "2006.16971")


@register("bn", papers=[NADO, SCHNEIDER], needs=[BATCH_NORM])
class BatchNormStatistics(Method):
    """Batch statistics in BatchNorm layers (Nado et al., 2020; Schneider et al., NeurIPS 2020).

    It keeps nothing between batches: `updates` counts the batches seen by their own statistics, and when a budget is
    spent the source's are back.

    prior: how many images the source's statistics count for; 0 is Nado's, who drop them.
    """

    def __init__(self, model: Classifier, *, prior: float = 0.0):
        super().__init__(model)
        if not prior >= 0:
            raise ValueError(f"prior, in images, must be at least 0, not {prior}")
        if not batch_norms(self.model.net):
            raise ValueError(
                f"{model.name} has no BatchNorm layer, whose statistics this method replaces; for models with "
                "other norm layers take another method, such as tent or eq7_adam"
            )
        self.prior = float(prior)
        self.statistics = StreamStatistics(self.model.net)

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        logits = self.with_batch_statistics(x)
        if not logits.isfinite().all():  # one image has spoilt the statistics of all
            self.engine.skipped += 1
            return self.look(x)
        self.engine.updates += 1
        return Pass(logits)

    def with_batch_statistics(self, x: Tensor) -> Tensor:
        layers: list[Any] = list(with_running_statistics(self.model.net))
        source = {layer: (layer.running_mean, layer.running_var) for layer in layers}

        def mix(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            layer.running_mean, layer.running_var = mixed(inputs[0], *source[layer], self.prior, len(x))

        handles = [layer.register_forward_pre_hook(mix) for layer in layers]
        try:
            return self.model(x)
        finally:
            for handle in handles:
                handle.remove()
            for layer, (mean, var) in source.items():
                layer.running_mean, layer.running_var = mean, var


def mixed(h: Tensor, mean: Tensor, var: Tensor, prior: float, images: int) -> tuple[Tensor, Tensor]:
    """Mean and variance for inputs h (B, channels, ...), of which one value a channel has no variance to speak of."""
    if h.numel() == h.shape[1] and not prior:
        return mean, var
    batch_var, batch_mean = torch.var_mean(h, [axis for axis in range(h.ndim) if axis != 1], correction=0)
    share = images / (prior + images)
    return (1 - share) * mean + share * batch_mean, (1 - share) * var + share * batch_var
