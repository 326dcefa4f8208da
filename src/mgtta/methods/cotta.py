"""CoTTA: a student that follows its own average's predictions (Wang et al., CVPR 2022; its equation numbers).

Notation    f_theta  student; f_theta'  teacher, the student's moving average (alpha = ema); f_theta_0  anchor, the
            source; p_th = confidence; p = restore, the share of weights that go back to the source at each batch

Followed: the authors' code for ImageNet, github.com/qinenergy/cotta: lr 0.01 with Nesterov momentum and restore 0.001.
The lr of 0.05 and restore of 0.01 stand only in the text of papers, such as MGTTA's (settings="mgtta"). Its code has lr
0.005 for ViT-B, as FOA's and SPA's do. The augmented views are averaged as logits, the anchor's confidence is the
batch's mean, and one draw of an augmentation serves the batch. The loss for ImageNet is the symmetric form of Eq. 5,
and so is ours by default: with Eq. 5 itself and an anchor that is sure, student and teacher are the same at the start,
and the gradient stays 0.
Ours on purpose: the authors' code moves only tensors called weight or bias; here, as in the paper, all parameters move.
"""

import copy

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.losses import cross_entropy, symmetric_cross_entropy
from mgtta.methods._augment import random_view
from mgtta.methods._descent import Descent
from mgtta.methods._taught import Taught
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net

PAPER = Paper("Continual Test-Time Domain Adaptation", "2203.13591")


@register(
    "cotta",
    papers=[PAPER],
    descent=Descent(lr=0.01, nesterov=True),
    code="github.com/qinenergy/cotta",
    mgtta={"lr": 0.05, "restore": 0.01, "nesterov": False},
    tries={"restore": (1e-4, 1e-3, 1e-2)},
    passes=(34, 1),
    revision=1,
)
class CoTTA(Taught):
    """A teacher averaged over time and augmentations, weights restored at random (Wang et al., CVPR 2022).

    confidence: p_th; below it the anchor's mean confidence calls for augmentations.
    symmetric: the loss of the authors' ImageNet system; False is the paper's, for which see methods/cotta.py.
    """

    changes_images = True
    random: torch.Generator

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        confidence: float = 0.1,
        augmentations: int = 32,
        restore: float = 0.001,
        ema: float = 0.999,
        symmetric: bool = True,
        seed: int = 0,
    ):
        if augmentations < 1:
            raise ValueError(f"augmentations must be at least 1, not {augmentations}")
        super().__init__(model)
        self.learns(lambda classifier: list(classifier.parameters()), optimizer)
        self.anchor = copy.deepcopy(self.model).requires_grad_(False)
        self.teacher = copy.deepcopy(self.anchor)
        self.taught = [name for name, _ in self.teacher.named_parameters()]
        self.confidence = confidence
        self.augmentations = augmentations
        self.restored = restore
        self.ema = ema
        self.measure = symmetric_cross_entropy if symmetric else cross_entropy
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def look(self, x: Tensor) -> Pass:
        """Return the teacher's logits: of x, or averaged over views of it if the anchor is unsure (Eq. 4)."""
        if not self.anchor(x).softmax(-1).amax(-1).mean() < self.confidence:
            return Pass(self.teacher(x))
        x = self.model.pixels(x)
        total = sum(self.teacher(random_view(x, self.random)) for _ in range(self.augmentations))
        return Pass(total / self.augmentations)  # Eq. 3

    def loss(self, x: Tensor) -> tuple[Pass, Tensor]:
        seen = self.look(x)
        return seen, self.measure(seen.logits, self.model(x)).mean()  # Eq. 5

    @torch.no_grad()
    def learned(self, seen: Pass) -> None:
        teacher: list[Tensor] = list(self.teacher.parameters())
        student: list[Tensor] = list(self.model.parameters())
        torch._foreach_mul_(teacher, self.ema)
        torch._foreach_add_(teacher, student, alpha=1 - self.ema)  # Eq. 2
        seed = int(torch.randint(2**62, (), generator=self.random))
        random = torch.Generator(seen.logits.device).manual_seed(seed)
        for p, p_0 in zip(student, self.anchor.parameters(), strict=True):
            M = torch.rand(p.shape, generator=random, device=p.device) < self.restored  # Eq. 7
            p.copy_(torch.where(M, p_0, p))  # Eq. 8

    def export(self) -> nn.Module:
        """Return a copy of your own module with the teacher's weights; views of an image are not averaged."""
        return export_net(self.model, dict(self.teacher.named_parameters()), statistics=self.statistics)
