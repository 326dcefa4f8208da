"""CSTU: a memory of images that is balanced over classes, recent and sure (RoTTA, Yuan et al., CVPR 2023).

Notation    C classes, N images at most; A age of an image in images that came after it; U its entropy
            H = lambda_t / (1 + exp(-A / N)) + lambda_u U / ln C, the score: the image of the highest one goes first
"""

import math

import torch
from torch import Tensor, nn


class CSTU(nn.Module):
    """The memory; its tensors are buffers, one row for each image that is kept.

    Attributes:
        images: (n, channels, H, W); without a shape as long as there is none.
        labels: the predicted classes, (n,).
        entropies: of the predictions, (n,).
        ages: number of images that came since, (n,).
    """

    images: Tensor
    labels: Tensor
    entropies: Tensor
    ages: Tensor

    def __init__(self, capacity: int, n_classes: int, lambda_t: float, lambda_u: float, like: Tensor):
        super().__init__()
        self.capacity = capacity
        self.n_classes = n_classes
        self.lambda_t = lambda_t
        self.lambda_u = lambda_u
        empty = torch.empty(0).to(like)
        whole = torch.empty(0, dtype=torch.long, device=like.device)
        self.register_buffer("images", empty)
        self.register_buffer("labels", whole)
        self.register_buffer("entropies", empty.clone())
        self.register_buffer("ages", whole.clone())

    def add(self, image: Tensor, label: Tensor, entropy: Tensor) -> None:
        """Take an image in, if there is room for it or another is worse; all that are kept grow older by one."""
        place = self._place(int(label), self.scores(torch.zeros_like(label), entropy))
        if place is not None:
            kept = torch.ones(len(self.labels), dtype=torch.bool, device=label.device)
            kept[place:][:1] = False
            before = self.images[kept] if len(self.images) else image[None][:0]
            self.images = torch.cat([before, image[None]])
            self.labels = torch.cat([self.labels[kept], label[None]])
            self.entropies = torch.cat([self.entropies[kept], entropy[None]])
            self.ages = torch.cat([self.ages[kept], torch.zeros_like(label[None])])
        self.ages = self.ages + 1

    def scores(self, ages: Tensor, entropies: Tensor) -> Tensor:
        """Return H of each image."""
        timeliness = (ages.to(entropies) / self.capacity).sigmoid()
        return self.lambda_t * timeliness + self.lambda_u * entropies / math.log(self.n_classes)

    def _place(self, label: int, score: Tensor) -> int | None:
        """Return the row that an image takes: the number of rows if there is room, None if it is not better."""
        counts = torch.bincount(self.labels, minlength=self.n_classes)
        if int(counts[label]) >= self.capacity / self.n_classes:
            rivals = self.labels == label
        elif len(self.labels) < self.capacity:
            return len(self.labels)
        else:
            rivals = (counts == counts.max())[self.labels]
        rows = rivals.nonzero().flatten()
        rows = rows[self.labels[rows].argsort(stable=True)]
        scores = self.scores(self.ages[rows], self.entropies[rows])
        worst = int((scores == scores.max()).nonzero()[-1])  # of equal ones the last, class by class
        return int(rows[worst]) if scores[worst] > score else None
