"""Methods with a pure objective: they write one function, and schedule, ranks and fast path follow from their type.

On a GPU the fast path captures all that is written here once and replays it. So it reads no values: what depends on
them is chosen by masks and `torch.where`, and what a method keeps is changed in place.
"""

from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass


class ObjectiveMethod(Method):
    """A method that lowers a function of logits and features, so that its step is the same for every batch.

    Without an optimizer it only predicts.
    """

    shares_batches = True
    reads_features = True  # False if neither its objective nor its answer does: then they are not computed

    def views(self, x: Tensor) -> Tensor:
        """Return the images that go through the network."""
        return x

    def merge(self, logits: Tensor) -> Tensor:
        """Return the logits of the images from those of their views."""
        return logits

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the scalar to lower."""
        raise TypeError(f"{type(self).__name__} defines no objective")

    def teaches(self, logits: Tensor) -> Tensor | None:
        """Return whether there is something to learn from a batch, one bool on its device; None: there always is."""
        return None

    def learned(self, seen: Pass, made: Tensor | bool = True) -> None:
        """Follow an update, given the forward pass from before it: for averages that a method keeps.

        Args:
            made: whether there was an update; if not, nothing may change. On the fast path, one bool on the device.
        """

    def quick_answer(self, seen: Pass, observe: bool) -> Tensor | None:
        """Return what `answer` does, by kernels for a GPU; None if there are none. Only the fast path asks."""
        return None

    def look(self, x: Tensor) -> Pass:
        if not self.reads_features:
            return Pass(self.merge(self.model(self.views(x))))
        logits, features = self.model.features(self.views(x))
        return Pass(self.merge(logits), features)

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        seen = self.look(x)
        teaches = self.teaches(seen.logits)
        if teaches is not None and self.ranks.all(~teaches):
            return seen, None
        return seen, self.objective(*seen)
