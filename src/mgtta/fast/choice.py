"""Which methods and networks take the fast path, and with which engine."""

from typing import TypeGuard

import torch

from mgtta._lib.names import spelled
from mgtta.adaptation.method import Method
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.fast.engine import FLOAT8_IS_FOR, FastEngine
from mgtta.fast.flat import RULES
from mgtta.fast.rounded import RoundedEngine
from mgtta.fast.vit import ViT
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters

KNOWN = (
    *(
        f"{package}.{kind}"
        for package in ("timm.models", "torchvision.models")
        for kind in ("convnext", "resnet", "swin_transformer", "vision_transformer")
    ),
    "mgtta.models.architectures",
)  # modules of networks that "auto" takes


def engine_for(method: Method, precision: str, low_memory: bool) -> FastEngine | RoundedEngine | None:
    """Return the engine of the fast path; None if "auto" does not take it. "bf16" and "fp8" take it or are refused."""
    if not fits(method, precision):
        return None
    if not is_captured(method):
        if low_memory:
            raise ValueError(f"low_memory is for steps that can be captured, and {method.name}'s cannot: leave it out")
        return RoundedEngine(method)
    return FastEngine(method, low_memory, "bf16" if precision == "auto" else precision)


def fits(method: Method, precision: str) -> bool:
    """Return True if the method takes the fast path: with "auto" it may, with "bf16" or "fp8" it must or is refused."""
    reason = refusal(method, precision)
    if precision == "auto":
        known = reason is None and method.max_seconds is None and is_known(method.model)
        return known and _has_bfloat16(next(method.model.parameters()).device)
    if reason is not None:
        other = "fp32" if precision == "bf16" or refusal(method, "bf16") else "bf16"
        raise ValueError(
            f"precision={precision!r} is not for {spelled(method.name)}: {reason}; take precision={other!r}"
        )
    return True


def refusal(method: Method, precision: str) -> str | None:
    """Return what keeps a method from the fast path; None if nothing does."""
    captured = is_captured(method)
    if not captured and not method.may_be_rounded:
        return "what it does depends on the values in a batch, not only on its shape"
    if captured and method.optimizer is not None and type(method.optimizer) not in RULES:
        return f"its optimizer is {type(method.optimizer).__name__}"
    if not {id(p) for p in method.adapted.values()} <= {id(p) for p in norm_parameters(method.model)}:
        return "it adapts parameters outside normalisation layers, which would be rounded"
    if next(method.model.parameters()).dtype != torch.float32:
        return "its model is not float32"
    if method.ranks.size > 1:
        return "ranks share its batches"
    if precision == "fp8" and not (captured and ViT.fits_float8(method.model)):
        return FLOAT8_IS_FOR
    return None


def is_captured(method: Method) -> TypeGuard[ObjectiveMethod]:
    """Return True if a method's step does not depend on the values in a batch, so that a graph can hold it."""
    return isinstance(method, ObjectiveMethod) and all(
        getattr(type(method), name) is getattr(ObjectiveMethod, name) for name in ("adapt", "loss", "look")
    )


def is_known(model: Classifier) -> bool:
    """Return True for networks that "auto" takes; others may hold float32 tensors of their own, or gain nothing."""
    return type(model.net).__module__ in KNOWN


def _has_bfloat16(device: torch.device) -> bool:
    """Return True for a GPU that computes in bfloat16; older ones emulate it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
