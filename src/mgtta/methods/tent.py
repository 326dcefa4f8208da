"""TENT: lower the entropy of the predictions through the norm layers (Wang et al., ICLR 2021).

Followed: the authors' settings for ImageNet, lr 2.5e-4 for ResNet-50 (github.com/DequanWang/tent); they have none for
ViTs, for which lr 1e-3 is that of github.com/mr-eggplant/SAR and of all later comparisons.
"""

from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters

PAPER = Paper("Tent: Fully Test-Time Adaptation by Entropy Minimization", "2006.10726")


@register(
    "tent",
    papers=[PAPER],
    descent=Descent(lr=1e-3),
    code="github.com/DequanWang/tent; for ViTs github.com/mr-eggplant/SAR",
    resnets={"lr": 2.5e-4},
    mgtta={"lr": 1e-3},
)
class Tent(ObjectiveMethod):
    """Entropy minimisation (Wang et al., ICLR 2021)."""

    reads_features = False

    def __init__(self, model: Classifier, optimizer: OptimizerFactory):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        mean = self.ranks.mean(entropy(logits))
        assert mean is not None  # a batch has at least one image, on some rank
        return mean
