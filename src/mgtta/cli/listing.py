"""The tables that `mgtta list` and `mgtta doctor` show."""

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mgtta import __version__
from mgtta._lib.shipped import shipped

# distribution -> what fails without it
PACKAGES = {
    "torch": "everything",
    "torchvision": "timm, and CoTTA's augmentations",
    "timm": "models",
    "safetensors": "files",
    "huggingface_hub": "downloads of pretrained weights",
    "webdataset": "tars",
    "pillow": "reading images",
    "numpy": "reading images",
    "matplotlib": "the fonts of the embedded data set",
    "cma": "FOA",
    "jinja2": "the report's page",
    "plotly": "the report's charts",
}
GIB = 2**30  # bytes


def show(*tables: Table) -> None:
    """Print the tables."""
    console = Console()
    for table in tables:
        console.print(table)


def tables() -> list[Table]:
    """Return the tables of `mgtta list`."""
    return [_methods(), _generators(), _models(), _data()]


def _methods() -> Table:
    from mgtta.methods.registry import recipes

    columns = ("method", "what it is", "kind", "needs", "settings: the authors'", "the MGTTA paper's, if others")
    table = Table(*columns, title="methods: mgtta.create(name, model, ...); name@mgtta has the MGTTA paper's settings")
    for recipe in recipes().values():
        own = recipe.settings
        authors = _words(own)
        if recipe.resnets:
            authors += f"; with BatchNorm or GroupNorm {_words(recipe.resnets)}"
        papers = "not run there"
        if recipe.mgtta is not None:
            papers = _words({key: value for key, value in recipe.mgtta.items() if value != own[key]})
        table.add_row(recipe.name, recipe.what, recipe.kind, ", ".join(recipe.needs) or "nothing", authors, papers)
    return table


def _words(settings: Mapping[str, Any]) -> str:
    from mgtta.methods.registry import REQUIRED

    return ", ".join(name if value is REQUIRED else f"{name}={value}" for name, value in settings.items())


def _generators() -> Table:
    from mgtta.learned.files import load_generator

    columns = ("generator", "hidden size", "memory", "trained on")
    table = Table(*columns, title="generators: mgtta.load_generator(name)")
    for name in shipped("generators"):
        generator = load_generator(name)
        protocol = str(generator.about.get("protocol", ""))
        table.add_row(name, str(generator.hidden_size), generator.memory_kind, protocol)
    return table


def _models() -> Table:
    table = Table("model", "what it is", title="models: mgtta.load_model(name)")
    for name in shipped("models"):
        table.add_row(name, f"comes with the package, for mgtta.data.{name.partition('_')[0]}")
    table.add_row("any timm name", "timm.list_models() shows them")
    return table


def _data() -> Table:
    from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
    from mgtta.data.datasets import KINDS

    table = Table("data", "what it is", title="data: mgtta adapt DATA, mgtta.data.datasets.open_dataset(path)")
    for kind, text in KINDS.items():
        table.add_row(kind, text)
    table.add_row("corruptions", ", ".join(CORRUPTIONS))
    table.add_row("validation corruptions", ", ".join(VALIDATION_CORRUPTIONS))
    return table


def health() -> tuple[Table, bool]:
    """Return the table of `mgtta doctor`, and whether nothing is missing."""
    table = Table("what", "found", "remedy", title="mgtta doctor")
    table.add_row("mgtta", __version__, "")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}", "")
    packages_found = _add_packages(table)
    devices_found = _add_devices(table)
    for kind in ("models", "sources", "generators"):
        table.add_row(f"shipped {kind}", ", ".join(shipped(kind)) or "none", "")
    return table, packages_found and devices_found


def _add_packages(table: Table) -> bool:
    """Add a row for each package; return whether all are installed."""
    complete = True
    for name, use in PACKAGES.items():
        try:
            table.add_row(name, importlib.metadata.version(name), "")
        except importlib.metadata.PackageNotFoundError:
            complete = False
            table.add_row(name, "[red]missing[/]", f"pip install {name}  (for {use})")
    return complete


def _add_devices(table: Table) -> bool:
    """Add a row for each device; return whether torch could be asked."""
    try:
        for row in _devices():
            table.add_row(*row)
        from mgtta._lib.timm import _library

        if _library is not None:
            table.add_row("torchvision", "its operators are built for another torch; none is used here", "")
    except ModuleNotFoundError as error:  # the rows of the packages name it too
        table.add_row("devices", f"[red]unknown without {error.name}[/]", f"pip install {error.name}")
        return False
    except Exception as error:
        table.add_row("devices", f"[red]{type(error).__name__}: {error}[/]", "install matching torch and torchvision")
        return False
    return True


def _devices() -> list[tuple[str, str, str]]:
    import torch

    rows = [("cpu", f"{torch.get_num_threads()} threads", "")]
    if not torch.cuda.is_available():
        return [*rows, ("cuda", "none", "adaptation runs on the CPU; a CUDA build of torch uses a GPU")]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        rows.append((f"cuda:{i}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB", ""))
    return rows
