"""DeYO: destroy your object (Lee et al., ICLR 2024): learn from images whose prediction depends on their shape.

Followed: the authors' code, github.com/Jhyun17/DeYO: tau_Ent = 0.5 ln C, lr 1e-3 for ViTs and 2.5e-4 for ResNets at
batch 64; norm layers of the last quarter of the blocks, and the final norm, stay frozen. The MGTTA paper runs it at
tau_Ent = 0.3 ln C, lr 5e-4, with all norm layers: settings="mgtta".
Ours on purpose: on a subset of the classes, x and x' are compared over that subset.

Equations are named by the paper's symbols: selection is S_theta(x), weighting is alpha_theta(x).
Notation    Ent  entropy of one prediction; Ent_0 = margin * ln C; tau_Ent = entropy_threshold * ln C
            x'  the image with its patches shuffled; PLPD  how much the pseudo-label's probability falls by that
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mgtta.adaptation.method import Method, OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.losses import entropy
from mgtta.methods._augment import check_images
from mgtta.methods._descent import Descent, doubled_at_one
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import early_norm_parameters, norm_parameters

PAPER = Paper(
    "Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors", "2403.07366"
)


@register(
    "deyo",
    papers=[PAPER],
    descent=Descent(lr=1e-3),
    code="github.com/Jhyun17/DeYO",
    resnets={"lr": 2.5e-4},
    mgtta={"lr": 5e-4, "entropy_threshold": 0.3, "all_norms": True},
    rate_at=doubled_at_one,
    passes=(2, 1),
    revision=1,
)
class DeYO(Method):
    """Entropy of images whose prediction depends on the object's shape (Lee et al., ICLR 2024).

    margin, entropy_threshold: Ent_0 of the weights and tau_Ent of the selection, in units of ln C.
    all_norms: the norm layers of the last quarter of the network adapt too.
    """

    changes_images = True
    may_be_rounded = True
    random: torch.Generator
    shares_batches = True

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        margin: float = 0.4,
        entropy_threshold: float = 0.5,
        plpd_threshold: float = 0.2,
        grid: int = 4,
        all_norms: bool = False,
        seed: int = 0,
    ):
        super().__init__(model)
        self.learns(norm_parameters if all_norms else early_norm_parameters, optimizer)
        self.margin = margin
        self.entropy_threshold = entropy_threshold
        self.plpd_threshold = plpd_threshold
        self.grid = grid
        self.random = torch.Generator().manual_seed(seed)

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        logits = self.model(x)
        Ent = entropy(logits)
        log_C = math.log(logits.shape[1])
        kept = (Ent < self.entropy_threshold * log_C).nonzero().flatten()
        order = self.ranks.draw(len(kept), lambda n: random_orders(n, self.grid, self.random))
        if order is None:
            return Pass(logits), None
        plpd = self.plpd(x, logits.detach(), kept, order)
        shaped = plpd > self.plpd_threshold  # S_theta(x)
        Ent = Ent[kept][shaped]
        weight = (self.margin * log_C - Ent.detach()).exp() + plpd[shaped].exp()  # alpha_theta(x)
        return Pass(logits), self.ranks.mean(weight * Ent)

    @torch.no_grad()
    def plpd(self, x: Tensor, logits: Tensor, kept: Tensor, order: Tensor) -> Tensor:
        """(p(x) - p(x')) at the pseudo-label, for the images of index `kept`: (n,)."""
        shuffled = shuffle_patches(self.model.pixels(x)[kept], self.grid, order)
        p = logits[kept].softmax(-1)
        p_shuffled = self.model(shuffled).softmax(-1)
        label = p.argmax(-1, keepdim=True)
        return (p - p_shuffled).gather(1, label)[:, 0]


def random_orders(n: int, grid: int, random: torch.Generator) -> Tensor:
    """For each of n images an order of its own of its patches: (n, grid * grid)."""
    return torch.rand(n, grid * grid, generator=random).argsort(1)


def shuffle_patches(x: Tensor, grid: int, order: Tensor) -> Tensor:
    """Each image's grid x grid patches in its order; resized and back where they do not fit in whole."""
    n, channels, height, width = check_images(x).shape
    h = max(1, height // grid)
    w = max(1, width // grid)
    fits = (h * grid, w * grid) == (height, width)
    if not fits:
        x = interpolate(x, (h * grid, w * grid), mode="bilinear", align_corners=False)
    order = order.to(x.device)
    patches = x.reshape(n, channels, grid, h, grid, w).permute(0, 2, 4, 1, 3, 5)  # (n, row, column, channels, h, w)
    patches = patches.reshape(n, grid * grid, channels, h, w)
    patches = patches[torch.arange(n, device=x.device)[:, None], order]
    patches = patches.reshape(n, grid, grid, channels, h, w).permute(0, 3, 1, 4, 2, 5)
    x = patches.reshape(n, channels, h * grid, w * grid)
    return x if fits else interpolate(x, (height, width), mode="bilinear", align_corners=False)
