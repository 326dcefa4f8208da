"""What adaptation has changed, as a snapshot: save it, load it, reset to the first one.

A snapshot holds the adapted parameters, the method's own buffers, the optimizer's state and the counters, as copies.
A snapshot that does not fit is rejected, and nothing changes.
"""

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mgtta._lib.files import fingerprint

if TYPE_CHECKING:
    from mgtta.adaptation.method import Method

NESTED = "_adaptation"  # the key of a snapshot within the state_dict of a module that contains the method


class Saved(nn.Module):
    """A module whose `state_dict` is a snapshot, on its own and inside another module."""

    def snapshot(self) -> dict[str, Any]:
        """Return all that adaptation has changed, as copies."""
        raise TypeError(f"{type(self).__name__} defines no snapshot")

    def restore(self, state: dict[str, Any]) -> None:
        """Load a snapshot, or raise a ValueError and change nothing."""
        raise TypeError(f"{type(self).__name__} defines no restore")

    def remember_start(self) -> None:
        """Keep the first snapshot, to which `reset` goes back."""
        raise TypeError(f"{type(self).__name__} defines no start")

    @torch.inference_mode(False)
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return all that adaptation has changed, as copies: parameters, buffers, optimizer, counters."""
        if args or kwargs:  # inside another module: torch collects key by key
            return super().state_dict(*args, **kwargs)
        return self.snapshot()

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        """Continue exactly where `state_dict` was taken. A state that does not fit is rejected and changes nothing."""
        self.remember_start()
        self.restore(state)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + NESTED] = self.snapshot()

    def _load_from_state_dict(  # torch calls it for each module, this one before the model in it
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.remember_start()
        if prefix + NESTED not in state_dict:
            missing_keys.append(prefix + NESTED)
            return
        try:
            self.restore(state_dict[prefix + NESTED])
        except ValueError as error:
            error_msgs.append(str(error))


class MethodState(Saved):
    """A method's state: snapshot, restore, reset, and what moves to another device with it."""

    random: torch.Generator | None
    start: dict[str, Any] | None

    def own_state(self) -> Any:
        """Return what is saved besides parameters, buffers and optimizer: plain values and tensors, nested."""
        return {} if self.random is None else {"random": self.random.get_state()}

    def load_own_state(self, own: Any) -> None:
        """Load what `own_state` gave."""
        if self.random is not None:
            self.random.set_state(own["random"].cpu())

    @property
    def kind(self: "Method") -> str:  # type: ignore[misc]
        """What a state must share with the method that loads it: class, optimizer and generator."""
        return " with ".join([type(self).__name__, *_kinds(self.optimizer)])

    def snapshot(self: "Method") -> dict[str, Any]:  # type: ignore[misc]
        return take(self)

    def restore(self: "Method", state: dict[str, Any]) -> None:  # type: ignore[misc]
        check(self, state)
        before = take(self)
        try:
            load(self, state)
        except Exception as error:
            load(self, before)
            raise ValueError(f"this state does not fit {self.kind}: {error}") from error

    def remember_start(self: "Method") -> None:  # type: ignore[misc]
        if self.start is None:
            self.start = take(self)

    def reset(self: "Method") -> None:  # type: ignore[misc]
        """Go back to exactly the source model, with a new optimizer state, memory and counters."""
        if self.start is not None:
            load(self, self.start)

    def __getstate__(self: "Method") -> Any:  # type: ignore[misc]
        _ = self.updates  # read what a GPU has counted before its tensors are copied
        return super().__getstate__()

    def _apply(self: "Method", fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Method":  # type: ignore[misc]
        """Move the optimizer's moments and memory along with the parameters."""
        self.engine.moving(fn)
        if self.adapted and fn(torch.empty(0)).dtype not in (torch.float32, torch.float64):
            raise TypeError("half precision rounds small updates away: keep the method in float32")
        nn.Module._apply(self, fn, recurse)
        for moments in self.optimizer.state.values() if self.optimizer is not None else ():
            for name, value in moments.items():
                if isinstance(value, Tensor) and value.ndim:
                    moments[name] = fn(value)
        return self


def take(method: "Method") -> dict[str, Any]:
    """Return a snapshot of a method."""
    return copied(
        {
            "kind": method.kind,
            "model": method.fingerprint,
            "params": {name: p.detach() for name, p in method.adapted.items()},
            "buffers": own_buffers(method),
            "optimizer": None if method.optimizer is None else method.optimizer.state_dict(),
            "counters": {"updates": method.updates, "skipped": method.skipped, "seconds": method.seconds},
            "extra": method.own_state(),
        }
    )


def check(method: "Method", state: Any) -> None:
    """Reject what is not a snapshot of such a method of the same model."""
    own = {"kind", "model", "params", "buffers", "optimizer", "counters", "extra"}
    if not isinstance(state, dict) or state.keys() != own:
        if isinstance(state, dict) and "schedule" in state:
            raise ValueError("this state and the method differ in schedule: one has none")
        check_kind(state, method.kind)
        raise ValueError("this is not a state that a method's state_dict gave")
    for key, expected in (("kind", method.kind), ("model", method.fingerprint)):
        if state[key] != expected:
            raise ValueError(f"this state belongs to another {key} ({state[key]}, not {expected})")


def check_kind(state: Any, expected: str) -> None:
    """Reject the state of another method, or of one with other wrappers, by its name."""
    found = state.get("kind") if isinstance(state, dict) else None
    if isinstance(found, str) and found != expected:
        raise ValueError(f"this state belongs to another kind ({found}, not {expected})")


@torch.inference_mode(False)
@torch.no_grad()
def load(method: "Method", state: dict[str, Any]) -> None:
    """Load a snapshot of this method; a ValueError says what does not fit, and then some of it may be loaded."""
    _ = method.updates  # read what a GPU has counted so far
    shapes = {name: p.shape for name, p in method.adapted.items()}
    if {name: p.shape for name, p in state["params"].items()} != shapes:
        raise ValueError("its parameters have other names or shapes")
    if not all(p.isfinite().all() for p in state["params"].values()):
        raise ValueError("its parameters are not finite")
    buffers = own_buffers(method)
    since_0_2 = {name for name in buffers if name.startswith("statistics.")}  # states of 0.1 do not have them
    if not buffers.keys() - since_0_2 <= state["buffers"].keys() <= buffers.keys():
        raise ValueError("its buffers have other names")
    if method.optimizer is not None:
        method.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for p, moments in method.optimizer.state.items():
            if any(t.ndim and t.shape != p.shape and len(t) != p.numel() for t in moments.values()):
                raise ValueError("its optimizer's tensors have other shapes")
    for name, value in state["params"].items():
        method.adapted[name].copy_(value)
    for name, value in state["buffers"].items():  # a buffer may have grown, as T3A's supports do
        path, _, attribute = name.rpartition(".")
        owner = method.get_submodule(path)
        old = getattr(owner, attribute)
        setattr(owner, attribute, value.clone().to(old.device))
    counters = state["counters"]
    method.engine.updates = counters["updates"]
    method.engine.skipped = counters["skipped"]
    method.seconds = counters["seconds"]
    method.load_own_state(copy.deepcopy(state["extra"]))


def copied(tree: Any) -> Any:
    """Return a copy of nested values, in which each tensor has only its own storage, also if it was a view."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(copied(value) for value in tree)
    return copy.deepcopy(tree)


def own_buffers(method: "Method") -> dict[str, Tensor]:
    """Return the buffers that belong to the method and not to its model."""
    return {name: b for name, b in method.named_buffers() if not name.startswith("model.")}


def _kinds(optimizer: Any) -> Iterator[str]:
    """Yield the names of an optimizer, of its generator and of the optimizer inside it."""
    if optimizer is not None:
        yield type(optimizer).__name__
        if hasattr(optimizer, "generator"):
            yield f"generator {fingerprint(optimizer.generator.state_dict())}"
        yield from _kinds(getattr(optimizer, "base", None))
