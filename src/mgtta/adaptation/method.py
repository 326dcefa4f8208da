"""What every method is: a classifier that predicts, then adapts, on every call, and never sees a label.

A method writes `loss`, or its whole step as `adapt`. One that lowers a function of logits and features is an
`ObjectiveMethod` (mgtta.adaptation.objective) and writes only that function.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mgtta._lib.names import spelled
from mgtta._lib.ranks import Alone
from mgtta.adaptation.budget import Budgeted
from mgtta.adaptation.state import MethodState, load
from mgtta.adaptation.step import EagerEngine, Engine, Pass
from mgtta.models.checks import IMAGE_AXES
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.norms import batch_norms, chosen_parameters
from mgtta.models.statistics import StreamStatistics

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
Events = Sequence[dict[str, Any]]


class Method(MethodState, Budgeted):
    """A method over its own copy of the model; yours stays as it is. Use one method for each stream.

    A subclass calls `learns` if it has an optimizer, keeps tensors of its own in buffers, and plain values in
    `own_state`. Reset, save and resume follow from that.

    Attributes:
        adapted: the parameters of the model that adapt, by name.
        origin: their values in the source model.
        random: the method's own random generator, on the CPU, if it draws numbers.
        ranks: the processes that share every batch; see `join`.
        start: the first snapshot, to which `reset` goes back; None before the first call.
        events: what a guard, recall or gather did, and why; see mgtta.Guard.
        pull: after each update the parameters move this share of the distance to the source.
        decay: the learning rate of an update after k others is lr / sqrt(1 + k / decay).
        waiting: images that were predicted and that the next update will learn from; see Gathered.
    """

    optimizer: Optimizer | None = None
    random: torch.Generator | None = None
    events: Events = ()
    cannot_export = ""  # why no network predicts as the method does; empty if one does
    changes_images = False  # True if it makes views of images, so that it refuses other inputs
    may_be_rounded = False  # True if a step of its own works with frozen weights in bfloat16; see mgtta.fast.rounded
    shares_batches = False  # True if every whole-batch statistic goes through `self.ranks`
    pull = 0.0
    decay = math.inf
    waiting = 0

    def __init__(self, model: Classifier):
        super().__init__()
        self.name = type(self).__name__  # `create` puts the recipe's name here
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.fingerprint = model.fingerprint()
        self.adapted: dict[str, nn.Parameter] = {}
        self.origin = nn.ParameterList()
        self.engine: Engine = EagerEngine(self)
        self.statistics: StreamStatistics | None = None  # of the stream, if BatchNorm layers normalise by batches
        self.start: dict[str, Any] | None = None

    def learns(
        self,
        params: Callable[[nn.Module], Iterable[nn.Parameter]],
        optimizer: OptimizerFactory,
        decay: float = math.inf,
    ) -> None:
        """Declare the parameters of the model that adapt, unless the user chose others, and the optimizer."""
        self.model.use_batch_statistics()
        if batch_norms(self.model.net):
            self.statistics = StreamStatistics(self.model.net)
        chosen = self.model.adapts
        found = params(self.model) if chosen is None else chosen_parameters(self.model.net, chosen)
        wanted = {id(p) for p in found}
        self.adapted = {name: p for name, p in self.model.named_parameters() if id(p) in wanted}
        for name, p in self.adapted.items():
            if p.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{name} is {p.dtype}, which rounds small updates away: adapt model.float()")
            p.requires_grad_()
        adapted = list(self.adapted.values())
        self.origin = nn.ParameterList(nn.Parameter(p.detach().clone(), requires_grad=False) for p in adapted)
        self.optimizer = optimizer(adapted)
        self.decay = decay

    def join(self, ranks: Alone) -> None:
        """Share every batch with other ranks: each gives its images, and all learn as one would from all of them."""
        if not self.shares_batches:
            raise ValueError(
                f"{spelled(self.name)} looks at a batch as a whole, so it cannot share one with other ranks: run it in "
                "one process, or take a method that can, such as tent or mgtta"
            )
        if self.model._uses_batch_statistics and batch_norms(self.model.net):
            raise ValueError(
                f"{self.model.name} has BatchNorm layers, which normalise by the whole batch, and a rank has only its "
                "share of it: run it in one process, or take a model with LayerNorm or GroupNorm"
            )
        self.model.takes_empty = True
        self.ranks = ranks

    # --- what a method may write

    def begin_step(self, x: Tensor) -> None:
        """Prepare for learning from x."""

    def look(self, x: Tensor) -> Pass:
        """Run the model on x, as the method stands."""
        return Pass(self.model(x))

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        """Return the forward pass and the scalar to lower; None if there is nothing to learn from."""
        return self.look(x), None

    def answer(self, seen: Pass, observe: bool) -> Tensor:
        """Return the logits that the caller gets.

        Args:
            observe: take the batch, learned from or not, into running statistics that a method keeps.
        """
        return seen.logits

    def domain_began(self) -> None:
        """Follow the news that the stream is of a new domain now: for running statistics of one domain."""

    def learned(self, seen: Pass) -> None:
        """Follow an update, given the forward pass from before it: for averages that a method keeps."""

    def adapt(self, x: Tensor) -> Pass:
        """Predict x and learn from it. A method that does more than lower a loss writes its own."""
        return self.engine.adapt(x)

    # --- what a caller uses

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of x from before its update, detached; then update."""
        return self.step(x).logits

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the logits of x as the method stands: no update, no counting, no graph."""
        self._check_input(x)
        return self.engine.step(x, learn=False, observe=False, collect=False).logits.detach()

    @property
    def predicting(self) -> Classifier:
        """The network that predicts: the adapting one, unless a method has another."""
        return self.model

    def step(self, x: Tensor, learn: bool = True, observe: bool = True, collect: bool | None = None) -> Pass:
        """Do what `forward` does, and return the features too.

        Args:
            learn: False: only predict and observe.
            observe: False: these images were predicted and observed before, so running statistics leave them out.
            collect: whether they go into the statistics of BatchNorm layers; by default those do that are observed.
        """
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise TypeError("DDP does not know how a method learns: give create(..., process_group=...) instead")
        self._check_input(x)
        self.remember_start()
        if self.paused or self.spent:
            return Pass(self.predict(x))
        if collect is None:
            collect = observe
        with self._timed(next(self.model.parameters()).device), torch.inference_mode(False):
            if isinstance(x, Tensor) and x.is_inference():
                x = x.clone()
            return self.engine.step(x, learn, observe, collect)

    def _check_input(self, x: Tensor) -> None:
        if self.changes_images and isinstance(x, Tensor) and x.ndim != IMAGE_AXES:
            raise ValueError(
                f"{spelled(self.name)} makes views of images, so it needs images (N, channels, H, W), not "
                f"{tuple(x.shape)}: take another method, such as tent or mgtta"
            )

    def learn(self, x: Tensor, few: bool = False) -> Pass:
        """Make one update from images that `step` has answered without learning from them: the answer came first.

        Args:
            few: they came few at a time; see adaptation/gathered.py, where it makes a difference.
        """
        return self.step(x, observe=False)

    def export(self) -> nn.Module:
        """Return a copy of your own module with the adapted weights, which predicts as the method does now."""
        if self.cannot_export:
            raise ValueError(f"{spelled(self.name)} cannot be exported: {self.cannot_export}")
        _ = self.updates  # a GPU may still be learning
        return export_net(self.model, self.adapted, statistics=self.statistics)

    @torch.inference_mode(False)
    def warm_up(self, x: Tensor, learn: bool | None = None, observe: bool = True, collect: bool = True) -> None:
        """Compile for batches of x's shape now; leaves no trace. On a CPU and in fp32 there is nothing to do.

        Args:
            learn: True: for steps that learn; False: for predictions; None: for both.
            observe: False: for images that are learned from after they were predicted and observed.
            collect: for images that go into the statistics of BatchNorm layers.
        """
        self.remember_start()
        before = self.snapshot()
        self.engine.warm_up(x, learn, observe, collect)
        load(self, before)
