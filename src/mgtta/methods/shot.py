"""SHOT-IM, online: information maximisation (Liang et al., ICML 2020, arXiv 2002.08546).

Notation    p_i  predicted probabilities of image i, (C,); H  entropy

    L = mean_i H(p_i) - H(mean_i p_i): each prediction is sure, and all classes are predicted

The paper adapts offline, over several epochs, with pseudo-labels by clustering. Ours is its information maximisation
only, one step for each batch. The norm layers adapt; the authors adapt the whole feature extractor and, as here, leave
the head. The learning rate is the authors' for a pre-trained feature extractor, which they let fall over the epochs. A
batch of one teaches nothing: its L is 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters

PAPER = Paper(
    "Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised Domain Adaptation",
    "2002.08546",
)


@register("shot", papers=[PAPER], descent=Descent(lr=1e-3, nesterov=True), code="github.com/tim-learn/SHOT")
class SHOT(ObjectiveMethod):
    """Information maximisation, online: sure predictions of diverse classes (Liang et al., ICML 2020).

    The norm layers adapt. Without the paper's pseudo-labels.
    """

    reads_features = False

    def __init__(self, model: Classifier, optimizer: OptimizerFactory):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        mean_entropy = self.ranks.mean(entropy(logits))
        mean_probs = self.ranks.mean(logits.softmax(-1))
        assert mean_entropy is not None  # a batch has at least one image, on some rank
        assert mean_probs is not None
        log_probs = mean_probs.clamp(min=torch.finfo(mean_probs.dtype).tiny).log()
        return mean_entropy + (mean_probs * log_probs).sum()
