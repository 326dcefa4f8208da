"""What NEO and FOA's shift have in common: features are moved by the difference of two means before the head.

Notation    f (N, D) what the head takes, which gives the logits W f + b; mu the mean that f is moved to; m the stream's
The head is linear, so the move adds W (mu - m) to the logits.
"""

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.methods._head import check_head, linear_centre, through_head
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.source import Source, as_source


class Recentred(Method):
    """Predicts with features moved by `direction()`, and learns from a batch by `follow(features)`.

    Args:
        source: gives mu; None: the origin.
        remedy: what an error tells to do if the head does not read what `source` describes.
    """

    centre: nn.Parameter

    def __init__(self, model: Classifier, source: Source | None, remedy: str):
        super().__init__(model)
        centre = torch.zeros_like(self.model.head.weight[0])
        self.checked = True
        if source is not None:
            statistics = as_source(source, model.name, self.fingerprint)
            centre = linear_centre(statistics, self.model, remedy)
            self.checked = statistics.head is not None
        self.centre = nn.Parameter(centre, requires_grad=False)  # mu, (D,)

    def direction(self) -> Tensor:
        """Return mu - m (D,); zeros while there is no m."""
        raise NotImplementedError

    def follow(self, features: Tensor) -> None:
        """Take the features (N, D) of a batch into m."""
        raise NotImplementedError

    def look(self, x: Tensor) -> Pass:
        """Predict by the present mean; as the source model before the first batch."""
        return Pass(self.model(x) + self.shift())

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source model's logits, and what its head takes (N, D)."""
        if not self.checked:
            check_head(self.model, x, "take neo without source")
            self.checked = True
        return self.model.embed(x)

    def learn_from(self, logits: Tensor, features: Tensor) -> None:
        """Follow the features and count an update, or count a skip if the batch is not finite."""
        if logits.isfinite().all() and features.isfinite().all():
            self.follow(features)
            self.engine.updates += 1
        else:
            self.engine.skipped += 1

    def shift(self, every_class: bool = False) -> Tensor:
        """Return what the move adds to the logits (C,), of the scored classes or of every class of the head."""
        return through_head(self.model, self.direction(), every_class)

    def export(self) -> nn.Module:
        """Return a copy of your own module with the shift in the bias of its head."""
        return export_net(self.model, head_shift=self.shift(every_class=True))
