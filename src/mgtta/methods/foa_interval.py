"""FOA-I: FOA that learns from several small batches together (Niu et al., ICML 2024, section 4.4, arXiv 2404.01650).

One image has no standard deviation, so FOA cannot judge its prompts by it. FOA-I predicts each image at once and keeps
it; when there are as many as the interval, it makes one update of FOA from all of them and forgets them. This is the
paper's V2, which keeps images; its V1 keeps features of all candidates, which takes more memory. The authors' code has
neither, and the paper does not say by which prompt an image is predicted before its update. Here it is the best one of
the last update, and the source model before the first. Of the intervals in the paper's Table 6, 4 to 64, the default
has the best accuracy.
"""

import torch
from torch import Tensor

from mgtta.adaptation.step import Pass
from mgtta.methods.foa import FOA, PAPER
from mgtta.methods.registry import SOURCE, TOKENS, register
from mgtta.models.classifier import Classifier
from mgtta.models.source import Source


@register(
    "foa_interval",
    papers=[PAPER],
    needs=[SOURCE, TOKENS],
    code="github.com/mr-eggplant/FOA; the interval: paper",
    passes=(29, 0),
)
class FOAInterval(FOA):
    """FOA-I: FOA for single images, which learns from several together (Niu et al., ICML 2024).

    interval: number of images of an update.
    """

    kept: Tensor

    def __init__(
        self,
        model: Classifier,
        *,
        source: Source,
        interval: int = 8,
        prompts: int = 3,
        population: int = 28,
        trade_off: float = 0.4,
        momentum: float = 0.9,
        seed: int = 0,
    ):
        super().__init__(
            model,
            source=source,
            prompts=prompts,
            population=population,
            trade_off=trade_off,
            momentum=momentum,
            seed=seed,
        )
        if interval < 2:
            raise ValueError(f"interval, the number of images of an update, must be at least 2, not {interval}")
        self.interval = interval
        self.register_buffer("kept", torch.empty(0).to(self.prompt))  # images since the last update

    @property
    def waiting(self) -> int:  # type: ignore[override]
        return len(self.kept)

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        seen = self.look(x)
        if not seen.logits.isfinite().all():
            self.engine.skipped += 1
            return seen
        x = self.model.pixels(x)
        self.kept = torch.cat([self.kept, x]) if len(self.kept) else x.clone()
        if len(self.kept) >= self.interval:
            super().adapt(self.kept)
            self.kept = self.kept[:0].flatten()
        return seen
