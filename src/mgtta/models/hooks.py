"""Hooks and forward functions that this library puts into a user's network, and how to remove them again."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

Hook = TypeVar("Hook", bound=Callable)


def own_hook(function: Hook) -> Hook:
    """Mark a hook as the library's own, so that `remove_own_hooks` finds it in any copy of the network."""
    function.is_mgtta_hook = True  # type: ignore[attr-defined]
    return function


def has_hook(module: nn.Module, function: Callable) -> bool:
    """Return whether the module has this forward pre-hook."""
    return any(hook is function for hook in module._forward_pre_hooks.values())


def set_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let a module run `function(module, *inputs)` instead of its own forward function."""
    module.forward = own_hook(partial(function, module))


def has_set_forward(module: nn.Module) -> bool:
    """Return whether `set_forward` gave the module its forward function."""
    return getattr(vars(module).get("forward"), "is_mgtta_hook", False)


def unset_forward(module: nn.Module) -> None:
    """Undo `set_forward`."""
    if has_set_forward(module):
        del module.forward


def remove_own_hooks(net: nn.Module) -> None:
    """Remove the library's own hooks and forward functions from all modules; the user's stay."""
    _remove(net, lambda hook: getattr(hook, "is_mgtta_hook", False))
    for module in net.modules():
        unset_forward(module)


def remove_hook(net: nn.Module, function: Callable) -> None:
    """Remove this one hook from all modules."""
    _remove(net, lambda hook: hook is function)


def _remove(net: nn.Module, wanted: Callable[[Callable], bool]) -> None:
    for module in net.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if wanted(hook):
                    del hooks[key]
