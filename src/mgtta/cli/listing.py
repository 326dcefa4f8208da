"""What there is, and whether it works: the tables behind `mgtta list` and `mgtta doctor`."""

import importlib.metadata
import platform

from rich.table import Table

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


def tables() -> list[Table]:
    from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
    from mgtta.data.datasets import KINDS
    from mgtta.methods.registry import REQUIRED, recipes

    methods = Table("method", "what it is", "needs", "settings", title="methods: mgtta.create(name, model, ...)")
    for name, recipe in recipes().items():
        settings = [key if default is REQUIRED else f"{key}={default}" for key, default in recipe.settings.items()]
        methods.add_row(name, recipe.what, ", ".join(recipe.needs) or "nothing", ", ".join(settings))

    generators = Table(
        "generator", "hidden size", "memory", "trained on", title="generators: mgtta.load_generator(name)"
    )
    from mgtta.learned.files import load_generator

    for name in shipped("generators"):
        generator = load_generator(name)
        about = str(generator.about.get("protocol", ""))
        generators.add_row(name, str(generator.hidden_size), generator.memory_kind, about)

    models = Table("model", "what it is", title="models: mgtta.load_model(name)")
    for name in shipped("models"):
        models.add_row(name, "comes with the package, for mgtta.data.glyphs")
    models.add_row("any timm name", "timm.list_models() shows them")

    data = Table("data", "what it is", title="data: mgtta adapt DATA, mgtta.data.datasets.open_dataset(path)")
    for kind, text in KINDS.items():
        data.add_row(kind, text)
    data.add_row("corruptions", ", ".join(CORRUPTIONS))
    data.add_row("validation corruptions", ", ".join(VALIDATION_CORRUPTIONS))
    return [methods, generators, models, data]


def health() -> tuple[Table, bool]:
    """The table, and whether nothing is missing."""
    table = Table("what", "found", "remedy", title="mgtta doctor")
    well = True
    table.add_row("mgtta", importlib.metadata.version("mgtta"), "")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}", "")
    for name, use in PACKAGES.items():
        try:
            table.add_row(name, importlib.metadata.version(name), "")
        except importlib.metadata.PackageNotFoundError:
            well = False
            table.add_row(name, "[red]missing[/]", f"pip install {name}  (for {use})")
    try:
        for row in _devices():
            table.add_row(*row)
        from mgtta._lib.timm import _library

        if _library is not None:
            table.add_row("torchvision", "its operators are built for another torch; none is used here", "")
    except ModuleNotFoundError as error:  # named above
        table.add_row("devices", f"[red]unknown without {error.name}[/]", f"pip install {error.name}")
        well = False
    except Exception as error:
        table.add_row("devices", f"[red]{type(error).__name__}: {error}[/]", "install matching torch and torchvision")
        well = False
    for kind in ("models", "sources", "generators"):
        table.add_row(f"shipped {kind}", ", ".join(shipped(kind)) or "none", "")
    return table, well


def _devices() -> list[tuple[str, str, str]]:
    import torch

    rows = [("cpu", f"{torch.get_num_threads()} threads", "")]
    if not torch.cuda.is_available():
        return [*rows, ("cuda", "none", "adaptation runs on the CPU; a CUDA build of torch uses a GPU")]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        rows.append((f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", ""))
    return rows
