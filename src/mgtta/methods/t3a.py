"""T3A: each class becomes the centroid of its most certain test features (Iwasawa & Matsuo, NeurIPS 2021).

Notation: z (N, D) what the head sees, S^k the supports of class k, unit vectors, M how many of them are kept.

  start      S^k = {w^k / ||w^k||}, the classifier's own row
  each batch S^k gains z / ||z|| of the images that the source classifier calls k
  filter     of S^k the M of lowest entropy stay, entropy being that of the source classifier's prediction
  predict    z . c^k, c^k the centroid of S^k

Followed: the authors' code, github.com/matsuolab/T3A, also where the paper differs, since the published figures are the
code's: c^k is scaled to unit length, and rows have the entropy of the prediction for w^k itself, unscaled. M = 20 is
what FOA and MGTTA take; the authors choose M from 1 to 100 on validation data.
Ours on purpose: row k is a support of class k, as the paper says, where the code labels it by the classifier's own
prediction for it, which may be another class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.losses import entropy
from mgtta.methods.registry import HEAD, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.head import linear_head

PAPER = Paper("Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization")


@register("t3a", papers=[PAPER], needs=[HEAD], code="github.com/matsuolab/T3A", mgtta={"supports": 20})
class T3A(Method):
    """Classes as centroids of their most certain test features (Iwasawa & Matsuo, NeurIPS 2021)."""

    supports: Tensor
    labels: Tensor
    entropies: Tensor

    def __init__(self, model: Classifier, *, supports: int = 20):
        super().__init__(model)
        if supports < 1:
            raise ValueError(f"supports, the number kept for each class, must be at least 1, not {supports}")
        self.most = supports
        head = self.model.head
        classes = self.model.classes
        index = slice(None) if classes is None else classes
        rows = head.weight.detach()[index]  # (C, D)
        bias = None if head.bias is None else head.bias.detach()[index]
        self.register_buffer("supports", F.normalize(rows, dim=-1))  # (S, D), S <= C M, ordered by class
        self.register_buffer("labels", torch.arange(len(rows), device=rows.device))  # (S,)
        self.register_buffer("entropies", entropy(F.linear(rows, rows, bias)))  # (S,)

    def look(self, x: Tensor) -> Pass:
        return Pass(self.classify(self.model.embed(x)[1]))

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        logits, z = self.model.embed(x)
        if logits.shape[1] != self.model.num_classes or z.shape[1] != self.supports.shape[1]:
            raise ValueError(
                f"{self.model.name} does not take its logits {tuple(logits.shape)} from its last linear layer "
                f"{tuple(self.model.head.weight.shape)}, which T3A replaces: give the module get_classifier()"
            )
        if logits.isfinite().all() and z.isfinite().all():
            self.add(z, logits)
            self.engine.updates += 1
        else:
            self.engine.skipped += 1
        return Pass(self.classify(z))

    def add(self, z: Tensor, logits: Tensor) -> None:
        """Take a batch among the supports, and keep the M most certain of each class."""
        supports = torch.cat([self.supports, F.normalize(z, dim=-1)])
        labels = torch.cat([self.labels, logits.argmax(-1)])
        entropies = torch.cat([self.entropies, entropy(logits)])
        order = entropies.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]  # by class, and within a class by entropy
        kept = order[_place(labels[order], self.model.num_classes) < self.most]
        self.supports = supports[kept]
        self.labels = labels[kept]
        self.entropies = entropies[kept]

    def export(self) -> nn.Module:
        """Return a copy of your own module with the centroids as its head."""
        if self.model.classes is not None:
            raise ValueError("t3a has centroids only for the scored classes: export a model with all classes")
        net = export_net(self.model)
        head = linear_head(net, self.model.name)
        head.weight = nn.Parameter(self.centroids().to(head.weight))
        head.register_parameter("bias", None)
        return net

    def classify(self, z: Tensor) -> Tensor:
        """Return the logits (N, C) of features by the present centroids."""
        return z @ self.centroids().T

    def centroids(self) -> Tensor:
        """Return the centroid of each class, (C, D)."""
        classes = self.model.num_classes
        table = self.supports.new_zeros(
            classes, self.most, self.supports.shape[1]
        )  # one place each: the same sum on any device
        table[self.labels, _place(self.labels, classes)] = self.supports
        return F.normalize(table.sum(1), dim=-1)


def _place(labels: Tensor, classes: int) -> Tensor:
    """The place of each element among those of its own class, for labels in ascending order."""
    count = torch.bincount(labels, minlength=classes)
    return torch.arange(len(labels), device=labels.device) - (count.cumsum(0) - count)[labels]
