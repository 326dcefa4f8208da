"""Which models work: 40 of torchvision, timm and transformers, with random weights, under the most common methods.

    python benchmarks/models.py --page docs/models.md

Each cell is one real run on random images, without download. It writes the table into the page, between its two marks;
without --page it prints the table. A cell says "yes", or why the library refuses. Three minutes on one core.

    source   source_statistics, saved and loaded
    mgtta+   and the other methods: two batches of four images; logits are finite, and parameters move
    resume   mgtta+ at its defaults: a saved state continues bit for bit in a new method
    export   mgtta+: your own module comes back, and predicts finite logits of all classes
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mgtta
from mgtta._lib.timm import timm, torchvision

START, END = "<!-- models: written by benchmarks/models.py -->", "<!-- models: end -->"
CLASSES = 10
SIDE = 64  # of the images, in pixels
IMAGES = 4  # of a batch
BATCHES = 2
COLUMNS = ("source", "mgtta", "mgtta+", "tent", "eata", "resume", "export")

Build = Callable[[], nn.Module]

TORCHVISION: dict[str, dict[str, Any]] = {  # name -> arguments besides the number of classes
    "resnet18": {},
    "resnext50_32x4d": {},
    "densenet121": {},
    "googlenet": {"init_weights": True, "aux_logits": False},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "efficientnet_b0": {},
    "regnet_y_400mf": {},
    "shufflenet_v2_x0_5": {},
    "mnasnet0_5": {},
    "convnext_tiny": {},
    "swin_t": {},
    "swin_v2_t": {},
    "vit_b_16": {"image_size": SIDE},
    "squeezenet1_1": {},
}
TIMM: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": {"img_size": SIDE},
    "deit_tiny_distilled_patch16_224": {"img_size": SIDE},
    "vit_tiny_r_s16_p8_224": {"img_size": SIDE},
    "vit_small_patch16_dinov3": {"img_size": SIDE},
    "eva02_tiny_patch14_224": {"img_size": SIDE, "patch_size": 16},
    "resnet50": {},
    "resnetv2_50x1_bit": {},
    "convnextv2_atto": {},
    "swin_tiny_patch4_window7_224": {"img_size": SIDE, "window_size": 4},
    "mixer_s32_224": {"img_size": SIDE},
    "resmlp_12_224": {"img_size": SIDE},
    "mobilenetv4_conv_small": {},
    "mobilevit_xxs": {},
    "xcit_nano_12_p16_224": {},
    "poolformer_s12": {},
    "ghostnetv2_100": {},
}
TRANSFORMER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
PATCHES = {"image_size": SIDE, "patch_size": 16}
TRANSFORMERS: dict[str, dict[str, Any]] = {  # name -> a small configuration of it
    "ViT": {**TRANSFORMER, **PATCHES},
    "DeiT": {**TRANSFORMER, **PATCHES},
    "Beit": {**TRANSFORMER, **PATCHES},
    "Dinov2": {**TRANSFORMER, **PATCHES},
    "Swin": {"image_size": SIDE, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "MobileNetV2": {"depth_multiplier": 0.35, "image_size": SIDE},
    "Segformer": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
}


def rows() -> list[tuple[str, str, Build]]:
    """Return library, name and how it is built, of each model."""
    import transformers

    found: list[tuple[str, str, Build]] = []
    for name, arguments in TORCHVISION.items():
        build = partial(torchvision.models.get_model, name, weights=None, num_classes=CLASSES, **arguments)
        found.append(("torchvision", name, build))
    for name, arguments in TIMM.items():
        found.append(("timm", name, partial(timm.create_model, name, num_classes=CLASSES, **arguments)))
    for name, config in TRANSFORMERS.items():
        made = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **config)
        found.append(("transformers", name, partial(getattr(transformers, f"{name}ForImageClassification"), made)))
    return found


def row(build: Build) -> dict[str, str]:
    """Return column -> "yes" or the error, for one model."""
    torch.manual_seed(0)
    x = torch.rand(IMAGES * BATCHES, 3, SIDE, SIDE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries, about themselves
            net = enlarged(build().eval())
        model = mgtta.load_model(net)
        source = saved(mgtta.source_statistics(model, x, batch_size=IMAGES))
    except ValueError as error:
        return {"source": str(error)}
    fisher = mgtta.fisher_information(model, x, batch_size=IMAGES)
    needs: dict[str, dict[str, Any]] = {
        "mgtta": {"source": source},
        "mgtta+": {"source": source, "gather": 0, "recall": 0},  # learn from every batch
        "tent": {},
        "eata": {"fisher": fisher, "margin": 10.0, "redundancy": 2.0},  # random logits: learn from every image
    }
    cells = {"source": "yes"}
    for name, settings in needs.items():
        cells[name] = tried(partial(adapts, name, model, settings, x))
    cells["resume"] = tried(partial(resumes, model, needs["mgtta"], x))
    cells["export"] = tried(partial(exports, model, needs["mgtta+"], x))
    cells["head"] = {True: "last norm", False: source.head_layer or "logits"}[bool(source.head_reads_last_layer)]
    return cells


def enlarged(net: nn.Module) -> nn.Module:
    """Return the network with a head of larger weights, since some libraries draw heads so small that all is zero."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and len(module.weight) == CLASSES:
                module.weight.normal_(std=0.1)
    return net


def saved(source: mgtta.SourceStatistics) -> mgtta.SourceStatistics:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source.safetensors"
        mgtta.save_source(source, path)
        return mgtta.load_source(path)


def tried(run: Callable[[], None]) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return "yes"


def adapts(name: str, model: mgtta.Classifier, settings: dict[str, Any], x: Tensor) -> None:
    method: Any = mgtta.create(name, model, **settings)
    for batch in x.split(IMAGES):
        logits = method(batch)
        if logits.shape != (IMAGES, CLASSES) or not logits.isfinite().all():
            raise ValueError("logits are not finite")
    moved = [not torch.equal(p, q) for p, q in zip(method.adapted.values(), method.origin, strict=True)]
    if method.updates != BATCHES or not any(moved):
        raise ValueError(f"{method.updates} updates in {BATCHES} batches")


def resumes(model: mgtta.Classifier, settings: dict[str, Any], x: Tensor) -> None:
    first, *others = x.split(IMAGES)
    method = mgtta.create("mgtta+", model, **settings)
    method(first)
    again = mgtta.create("mgtta+", model, **settings)
    again.load_state_dict(method.state_dict())
    if not all(torch.equal(method(batch), again(batch)) for batch in others):
        raise ValueError("a resumed method predicts otherwise")


def exports(model: mgtta.Classifier, settings: dict[str, Any], x: Tensor) -> None:
    method = mgtta.create("mgtta+", model, **settings)
    for batch in x.split(IMAGES):
        method(batch)
    net = method.export()
    if type(net) is not type(model.net):
        raise ValueError(f"the export is a {type(net).__name__}")
    with torch.no_grad():
        logits = mgtta.load_model(net, normalised=True)(model.prepare(x[:IMAGES]))
    if logits.shape != (IMAGES, CLASSES) or not logits.isfinite().all():
        raise ValueError("its logits are not finite")


def table(cells: dict[tuple[str, str], dict[str, str]]) -> str:
    """Return the table in markdown, with the refusals as notes below it."""
    notes: list[str] = []
    lines = [f"| library | model | {' | '.join(COLUMNS)} | re-centred at |", f"|---|---|{'---|' * (len(COLUMNS) + 1)}"]
    for (library, name), found in cells.items():
        marks = []
        for column in COLUMNS:
            said = found.get(column, "")
            if said not in ("", "yes"):
                if said not in notes:
                    notes.append(said)
                said = f"no [{notes.index(said) + 1}]"
            marks.append(said)
        where = found.get("head", "")
        if where not in ("", "logits", "last norm"):
            where = f"`{where}`"
        lines.append(f"| {library} | `{name}` | {' | '.join(marks)} | {where} |")
    said = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *said]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    parser.add_argument("--only", help="the names that have this text in them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = {}
    for library, name, build in rows():
        if args.only and args.only not in name:
            continue
        cells[library, name] = row(build)
        print(library, name, cells[library, name], flush=True)
    text = table(cells)
    if args.page is None:
        print(text)
        return
    before, _, rest = args.page.read_text().partition(START)
    _, _, after = rest.partition(END)
    args.page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
