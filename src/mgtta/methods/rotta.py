"""RoTTA: a teacher, a balanced memory and robust BatchNorm (Yuan et al., CVPR 2023, arXiv 2303.13899).

Notation    theta_S, theta_T  student and teacher; N images in the memory; A the age of an image there

    predict    by the teacher, with its own running statistics in BatchNorm layers
    memory     each image goes into CSTU (see _cstu.py) with the teacher's prediction
    update     after every N images: L = mean_i w_i H(teacher(x_i), student(view of x_i)), w = 1 / (1 + exp(A / N)); the
               student steps on L, then theta_T <- (1 - nu) theta_T + nu theta_S
    robust BN  in an update, mean and variance of each network are (1 - alpha) old + alpha batch, and stay so

Settings are those of the authors' code. Only BatchNorm layers adapt; a view is CoTTA's, one draw for the memory.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.step import EagerEngine, Pass
from mgtta.losses import cross_entropy, entropy
from mgtta.methods._augment import check_images, random_view
from mgtta.methods._cstu import CSTU
from mgtta.methods._descent import Descent
from mgtta.methods._robust_bn import RobustStatistics
from mgtta.methods._taught import Taught
from mgtta.methods.registry import BATCH_NORM, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.norms import batch_norms

PAPER = Paper("Robust Test-Time Adaptation in Dynamic Scenarios", "2303.13899")


@register(
    "rotta",
    papers=[PAPER],
    needs=[BATCH_NORM],
    descent=Descent(1e-3, "adam"),
    code="github.com/BIT-DA/RoTTA",
    passes=(3, 1),
)
class RoTTA(Taught):
    """A slow teacher, a balanced memory of images and robust BatchNorm statistics (Yuan et al., CVPR 2023).

    capacity: images in the memory.
    frequency: images between two updates.
    alpha: share of a batch in the statistics of BatchNorm layers.
    nu: share of the student in the teacher at each update.
    lambda_t, lambda_u: weights of age and uncertainty, by which an image leaves the memory.
    """

    changes_images = True
    engine: EagerEngine
    random: torch.Generator

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        capacity: int = 64,
        frequency: int = 64,
        alpha: float = 0.05,
        nu: float = 0.001,
        lambda_t: float = 1.0,
        lambda_u: float = 1.0,
        seed: int = 0,
    ):
        super().__init__(model)
        if not batch_norms(self.model.net):
            raise ValueError(
                f"{model.name} has no BatchNorm layer, whose statistics rotta follows; for models with other norm "
                "layers take another method, such as tent or cotta"
            )
        if capacity < 1 or frequency < 1:
            raise ValueError(f"capacity and frequency must be at least 1, not {capacity} and {frequency}")
        self.learns(_batch_norm_parameters, optimizer)
        self.model.use_running_statistics()
        self.statistics = None
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.taught = list(self.adapted)
        self.student_statistics = RobustStatistics(self.model.net)
        self.teacher_statistics = RobustStatistics(self.model.net)
        like = next(iter(self.adapted.values()))
        self.memory = CSTU(capacity, self.model.num_classes, lambda_t, lambda_u, like)
        self.frequency = frequency
        self.alpha = alpha
        self.nu = nu
        self.images = 0  # since the last reset
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def look(self, x: Tensor) -> Pass:
        with self.teacher_statistics.normalising(self.teacher.net):
            return Pass(self.teacher(x))

    def adapt(self, x: Tensor) -> Pass:
        seen = self.look(x)
        if not seen.logits.isfinite().all():
            self.engine.skipped += 1
            return seen
        x = check_images(self.model.pixels(x))
        labels = seen.logits.argmax(-1)
        for image, label, uncertainty in zip(x, labels, entropy(seen.logits), strict=True):
            self.memory.add(image, label, uncertainty)
            self.images += 1
            if self.images % self.frequency == 0 and not self.spent and self.engine.learn(self.memory_loss()):
                self._follow()
        return seen

    def memory_loss(self) -> Tensor:
        """Return L of the memory; both networks take its statistics in."""
        x = self.memory.images
        with torch.no_grad(), self.teacher_statistics.normalising(self.teacher.net, self.alpha):
            target = self.teacher(x)
        with self.student_statistics.normalising(self.model.net, self.alpha):
            logits = self.model(random_view(x, self.random))
        weight = (-self.memory.ages.to(logits) / self.memory.capacity).sigmoid()
        return (weight * cross_entropy(target, logits)).mean()

    @torch.no_grad()
    def _follow(self) -> None:
        """Let the teacher follow the student."""
        for name, p in self.adapted.items():
            self.teacher.get_parameter(name).lerp_(p, self.nu)

    def export(self) -> nn.Module:
        """Return a copy of your own module with the teacher's weights and statistics."""
        return export_net(self.teacher, statistics=self.teacher_statistics)

    def own_state(self) -> Any:
        return {**super().own_state(), "images": self.images}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        self.images = own["images"]


def _batch_norm_parameters(classifier: nn.Module) -> list[nn.Parameter]:
    return [p for layer in batch_norms(classifier) for p in layer.parameters(recurse=False)]
