"""Load the weights of a foreign checkpoint into a network, strictly."""

import os
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from mgtta._lib.files import read_weights

WRAPPERS = (  # where a foreign checkpoint may keep its weights; averaged ones first, as in timm
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model",
    "model_state_dict",
)
AVERAGED = re.compile(r"(^|[._])ema([._]|$)")  # in the prefix of averaged weights, such as "model_ema.module."
COUNTER = "num_batches_tracked"  # of BatchNorm layers, which old files do not have
PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and Lightning


def load_weights(net: nn.Module, checkpoint: str | os.PathLike) -> None:
    """Load the weights of a checkpoint strictly."""
    own = net.state_dict()
    counters = {name: value for name, value in own.items() if name.endswith(COUNTER)}
    needed = {name: value for name, value in own.items() if name not in counters}
    state = counters | _unwrapped(read_weights(checkpoint), needed)
    problems = _differences(state, own)
    if problems:
        raise ValueError(
            f"{checkpoint} does not fit {type(net).__name__} ({'; '.join(problems)}): name the architecture it was "
            "made for, and num_classes=... where its head has another size"
        )
    net.load_state_dict(state)


def _unwrapped(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the weights inside a foreign checkpoint, by the network's own names."""
    for wrapper in WRAPPERS:
        if isinstance(state.get(wrapper), dict) and state[wrapper]:
            return _unwrapped(state[wrapper], own)
    prefix = _prefix(state, own)
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _prefix(state: dict[str, Any], own: dict[str, Any]) -> str:
    """Return what stands before the network's own names; that of averaged weights if there are several.

    Names of other modules, such as a loss, may stand beside them.
    """
    if own.keys() <= state.keys():
        return ""
    longest = max(own, key=lambda name: (name.count("."), len(name)))
    found = {key.removesuffix(longest) for key in state if key.endswith(f".{longest}")}
    fitting = [prefix for prefix in found if all(prefix + name in state for name in own)]
    if fitting:
        return min(fitting, key=lambda prefix: (not AVERAGED.search(prefix), len(prefix), prefix))
    common = [prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in state)]
    return common[0] if common else ""  # the weights do not fit; the error names what differs


def _differences(state: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return what keeps a state from being loaded; an empty list if nothing does."""
    problems = []
    missing = sorted(own.keys() - state.keys())
    if missing:
        problems.append(f"missing: {_first_names(missing)}")
    extra = sorted(state.keys() - own.keys())
    if extra:
        problems.append(f"unknown: {_first_names(extra)}")
    common = sorted(own.keys() & state.keys())
    wrong = [name for name in common if own[name].shape != getattr(state[name], "shape", None)]
    for name in wrong[:3]:
        found = tuple(getattr(state[name], "shape", ()))
        problems.append(f"{name} is {found}, the model's is {tuple(own[name].shape)}")
    return problems


def _first_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
