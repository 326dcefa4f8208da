"""Generator files: safetensors with metadata, the shipped ones, and the authors' released format."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgtta import __version__
from mgtta._lib.files import check_kind, read_tensors, read_weights, write_tensors
from mgtta._lib.shipped import shipped
from mgtta.learned.generator import MetaGradientGenerator

KIND = "mgtta generator"
VERSION = 1

# released name -> ours; shapes differ only by leading axes of size 1
_RELEASED = {
    "W1": "memory.W",
    "b1": "memory.b",
    "learnable_token_idx": "memory.lr_scale",
    "learnable_ttt_lr_weight": "memory.lr_weight",
    "learnable_ttt_lr_bias": "memory.lr_bias",
    "ttt_norm_weight": "memory.norm.weight",
    "ttt_norm_bias": "memory.norm.bias",
    "q_proj.weight": "q_proj.weight",
    "k_proj.weight": "memory.k_proj.weight",
    "v_proj.weight": "memory.v_proj.weight",
    "o_proj.weight": "o_proj.weight",
    "post_norm.weight": "post_norm.weight",
    "post_norm.bias": "post_norm.bias",
}
_RELEASED_PREFIX = "seq_modeling_block."
_ALIASES = {"paper": "imagenet"}  # trained as in the paper, in the paper's form


def save_generator(generator: MetaGradientGenerator, path: str | os.PathLike, **about: Any) -> None:
    """Write the generator to a file, with `about` added to what it knows of its training (generator.about)."""
    metadata = {
        "kind": KIND,
        "version": str(VERSION),
        "hidden_size": str(generator.hidden_size),
        "memory": generator.memory_kind,
        "about": json.dumps({"mgtta": __version__, "torch": torch.__version__, **generator.about, **about}),
    }
    write_tensors(path, generator.state_dict(), metadata)


def load_generator(name_or_path: str | os.PathLike) -> MetaGradientGenerator:
    """Return a shipped generator by its name, or one from a file that save_generator wrote.

    "paper" is "imagenet": the paper's form, with 164 weights, trained by the paper's Algorithm 1.
    """
    names = shipped("generators")
    name = str(name_or_path)
    path = Path(names.get(_ALIASES.get(name, name), name_or_path))
    if not path.is_file():
        raise FileNotFoundError(f"unknown generator {str(name_or_path)!r}: give a file, or one of {', '.join(names)}")
    if path.suffix in (".pth", ".pt"):
        raise ValueError(f"{path}: read the authors' format with mgtta.import_released, not with load_generator")
    tensors, metadata = read_tensors(path)
    check_kind(metadata, KIND, VERSION, path, "mgtta.save_generator writes one")
    try:
        generator = MetaGradientGenerator(int(metadata["hidden_size"]), metadata["memory"])
        generator.about = json.loads(metadata["about"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: damaged metadata ({error}); save the generator again") from error
    _fill(generator, tensors, path)
    return generator


def import_released(path: str | os.PathLike) -> MetaGradientGenerator:
    """Return a generator from the authors' checkpoint: a torch file with `model_state_dict`, read as plain weights."""
    state = read_weights(path).get("model_state_dict")
    if not isinstance(state, dict):
        raise ValueError(f"{path} has no 'model_state_dict': it is not a checkpoint of the released format")
    names = {_RELEASED_PREFIX + theirs: ours for theirs, ours in _RELEASED.items()}
    missing = sorted(names.keys() - state.keys())
    extra = sorted(state.keys() - names.keys())
    if missing or extra:
        raise ValueError(
            f"{path} is not a checkpoint of the released format: missing {missing[:3]}, unknown {extra[:3]}"
        )
    if not all(isinstance(t, Tensor) and t.numel() for t in state.values()):
        raise ValueError(f"{path} is not a checkpoint of the released format: not all of its weights are tensors")
    generator = MetaGradientGenerator(state[_RELEASED_PREFIX + "o_proj.weight"].numel())
    own = generator.state_dict()
    tensors = {}
    for theirs, ours in names.items():
        if state[theirs].numel() != own[ours].numel():
            raise ValueError(f"{path}: {theirs} is {tuple(state[theirs].shape)}, {tuple(own[ours].shape)} was expected")
        tensors[ours] = state[theirs].reshape(own[ours].shape)
    _fill(generator, tensors, Path(path))
    generator.about = {"imported from": Path(path).name}
    return generator


def _fill(generator: MetaGradientGenerator, tensors: dict[str, Tensor], path: Path) -> None:
    """Load weights that must fit the generator and be finite, in their own dtype."""
    own = generator.state_dict()
    shapes = {name: tuple(t.shape) for name, t in own.items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if found != shapes:
        wrong = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))
        raise ValueError(f"{path}: its weights do not fit its metadata (at {wrong[0]}); save the generator again")
    if not all(t.isfinite().all() for t in tensors.values()):
        raise ValueError(f"{path}: the generator has weights that are not finite")
    generator.to(next(iter(tensors.values())).dtype).load_state_dict(tensors)
