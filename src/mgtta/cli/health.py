"""The table of `mgtta doctor`: packages, devices, memory, bfloat16, and the time of a step."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable

from rich.table import Column, Table

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
}
GIB = 2**30  # bytes
STEP_IMAGES = 16  # of the step that is timed
MODEL = "glyphs_vit"  # the model that is timed
Row = tuple[str, str, str]


def health() -> tuple[Table, bool]:
    """Return the table of `mgtta doctor`, and whether nothing is missing."""
    columns = [Column(name, overflow="fold") for name in ("what", "found", "remedy")]
    table = Table(*columns, title="mgtta doctor")
    table.add_row("mgtta", __version__, "")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}", "")
    healthy = _add_packages(table)
    if healthy:
        for rows in (_devices, _bfloat16, _step):
            healthy &= _add(table, rows)
    else:
        table.add_row("devices", "[red]unknown without the packages above[/]", "install them first")
    for kind in ("models", "sources", "generators"):
        table.add_row(f"shipped {kind}", ", ".join(shipped(kind)) or "none", "")
    return table, healthy


def _add_packages(table: Table) -> bool:
    """Add a row for each package; return whether all are installed."""
    complete = True
    remarks = _remarks()
    for name, use in PACKAGES.items():
        try:
            table.add_row(name, importlib.metadata.version(name), remarks.get(name, ""))
        except importlib.metadata.PackageNotFoundError:
            complete = False
            table.add_row(name, "[red]missing[/]", f"pip install {name}  (for {use})")
    return complete


def _remarks() -> dict[str, str]:
    """Return package -> what is unusual about it here."""
    try:
        from mgtta._lib.timm import _library
    except Exception:  # a package is missing or does not fit; its row, or that of the devices, says so
        return {}
    if _library is None:
        return {}
    return {"torchvision": "built for another torch; mgtta does not need the operators that fail"}


def _add(table: Table, rows: Callable[[], list[Row]]) -> bool:
    """Add rows; if they cannot be made, add the error and return False."""
    try:
        for row in rows():
            table.add_row(*row)
    except Exception as error:
        found = f"[red]{type(error).__name__}: {error}[/]"
        table.add_row(rows.__name__.strip("_"), found, "install matching torch and torchvision")
        return False
    return True


def _devices() -> list[Row]:
    """Return the processors with their memory."""
    import torch

    rows = [("cpu", f"{torch.get_num_threads()} threads, {_memory()}", "")]
    if not torch.cuda.is_available():
        rows.append(("cuda", "none", "adaptation runs on the CPU; a CUDA build of torch uses a GPU"))
    else:
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            memory = f"{total / GIB:.0f} GiB, {free / GIB:.0f} GiB free"
            rows.append((f"cuda:{i}", f"{torch.cuda.get_device_properties(i).name}, {memory}", ""))
    return rows


def _memory() -> str:
    """Return the machine's memory in words."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "memory unknown"
    return f"{total / GIB:.0f} GiB, {free / GIB:.0f} GiB free"


def _bfloat16() -> list[Row]:
    """Try bfloat16 layers on the CPU, in a child process that may die."""
    from mgtta._lib.cpu import LIMIT, check_bfloat16

    try:
        check_bfloat16()
    except RuntimeError:
        remedy = f"--precision fp32, or {LIMIT} in the environment"
        return [("bfloat16 on the cpu", "[yellow]does not work[/]", remedy)]
    return [("bfloat16 on the cpu", "works", "")]


def _step() -> list[Row]:
    """Time one prediction and one step of adaptation on each kind of device."""
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows: list[Row] = []
    for device in devices:
        predicting, adapting = step_seconds(device)
        found = f"{1000 * predicting:.0f} ms to predict, {1000 * adapting:.0f} ms to predict and adapt"
        rows.append((f"a step on {device}", f"{found}: {STEP_IMAGES} images, {MODEL}, mgtta", ""))
    return rows


def step_seconds(device: str) -> tuple[float, float]:
    """Return the seconds of a prediction and of a step of adaptation; the faster of two, after one to warm up."""
    import torch

    import mgtta
    from mgtta.data.glyphs import Glyphs

    x = Glyphs(STEP_IMAGES).tensors()[0]
    method = mgtta.create("mgtta", mgtta.load_model(MODEL).to(device), source=MODEL, precision="fp32")

    def seconds(call: Callable[[torch.Tensor], torch.Tensor]) -> float:
        began = time.perf_counter()
        call(x).cpu()
        return time.perf_counter() - began

    predicting = [seconds(method.predict) for _ in range(3)]
    adapting = [seconds(method) for _ in range(3)]
    return min(predicting[1:]), min(adapting[1:])
