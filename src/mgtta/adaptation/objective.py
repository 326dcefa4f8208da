"""Methods with a pure objective: they write one function, and schedule, ranks and fast path follow from their type."""

from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass


class ObjectiveMethod(Method):
    """A method that lowers a function of logits and features, so that its step is the same for every batch.

    Without an optimizer it only predicts.
    """

    shares_batches = True

    def views(self, x: Tensor) -> Tensor:
        """Return the images that go through the network."""
        return x

    def merge(self, logits: Tensor) -> Tensor:
        """Return the logits of the images from those of their views."""
        return logits

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the scalar to lower."""
        raise TypeError(f"{type(self).__name__} defines no objective")

    def look(self, x: Tensor) -> Pass:
        logits, features = self.model.features(self.views(x))
        return Pass(self.merge(logits), features)

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        seen = self.look(x)
        return seen, self.objective(*seen)
