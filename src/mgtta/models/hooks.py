"""Hooks that this library puts into a user's network, and how to remove them again."""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

Hook = TypeVar("Hook", bound=Callable)


def own_hook(function: Hook) -> Hook:
    """Mark a hook as the library's own, so that `remove_own_hooks` finds it in any copy of the network."""
    function.is_mgtta_hook = True  # type: ignore[attr-defined]
    return function


def has_hook(module: nn.Module, function: Callable) -> bool:
    """Return whether the module has this forward pre-hook."""
    return any(hook is function for hook in module._forward_pre_hooks.values())


def remove_own_hooks(net: nn.Module, only: Callable | None = None) -> None:
    """Remove the library's own hooks, or only one function's, from all modules; the user's hooks stay."""
    for module in net.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                wanted = getattr(hook, "is_mgtta_hook", False) if only is None else hook is only
                if wanted:
                    del hooks[key]
