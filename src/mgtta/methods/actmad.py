"""ActMAD: match the statistics of activations with the source's (Mirza et al., CVPR 2023, arXiv 2211.12870).

Notation    mu_i, var_i  mean and unbiased variance over the batch of the features of layer i, (d_i,)
            mu_i^S, var_i^S  the source's

    L = 1/2 sum_i ( mean |mu_i - mu_i^S| + mean |var_i - var_i^S| ), where the mean is over the features of a layer

L1 distances and the factor 1/2 are those of the authors' code for classifiers. Ours differs on purpose in three places.
Features are the pooled ones of our source statistics (in a ViT the class token), not each place of each norm layer.
Only norm layers adapt, by SGD with momentum; the authors move all parameters of a ResNet-18 with lr 2.5e-4, Nesterov
momentum and weight decay. BatchNorm layers normalise by the batch, as in all methods here; the authors keep the
source's statistics. The learning rates are what the authors of SPA chose for ActMAD on the norm layers of a ViT-B and
of a ResNet-50 with GroupNorm.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.methods._descent import Descent
from mgtta.methods.registry import SOURCE, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters
from mgtta.models.source import Source, as_source

PAPER = Paper("ActMAD: Activation Matching to Align Distributions for Test-Time-Training", "2211.12870")
EQ_7_WEIGHT = 0.4 / 64  # of the discrepancy in `mgtta.losses.objective`


@register(
    "actmad",
    papers=[PAPER],
    needs=[SOURCE],
    descent=Descent(lr=5e-3),
    code="github.com/jmiemirza/ActMAD; the learning rates github.com/mr-eggplant/SPA",
    resnets={"lr": 1e-3},
)
class ActMAD(ObjectiveMethod):
    """Activation statistics matched with the source's, without entropy (Mirza et al., CVPR 2023).

    squared: True: squared distances of means and standard deviations, which is MGTTA's Eq. 7 without its entropy. With
    lr=0.05 and momentum=0 it is the ablation of eq7_sgd.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        source: Source,
        squared: bool = False,
    ):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)
        self.source = as_source(source, model.name, self.fingerprint)
        self.squared = squared

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return L, or the discrepancy of Eq. 7. One image has no variance: for a batch of one only the means count."""
        if torch.is_grad_enabled() and not any(f.requires_grad for f in features):
            raise ValueError(
                f"no parameter that adapts changes the features of {self.model.name} that actmad compares, as in a "
                "network with one normalisation layer: take another method, such as tent or mgtta"
            )
        source = self.source = self.source.to(logits)
        source_mean = torch.cat(list(source.mean))  # (D,), D counts the features of all layers
        source_std = torch.cat(list(source.std))
        no_values = logits.new_zeros(len(logits))
        _, (mean, std) = self.ranks.moments(no_values, torch.cat(list(features), 1), source_mean)
        if self.squared:
            total = (mean - source_mean).square().sum()
            if std is not None:
                total = total + (std - source_std).square().sum()
            return EQ_7_WEIGHT * total
        distance = (mean - source_mean).abs()
        if std is not None:
            distance = distance + (std.square() - source_std.square()).abs()
        layers = distance.split([f.shape[1] for f in features])
        return torch.stack([layer.mean() for layer in layers]).sum() / 2
