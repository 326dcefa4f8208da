"""The house: a module imports only from modules above it, and timm and Triton have one door each."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import mgtta

ROOT = Path(mgtta.__file__).parent
ORDER = [
    "__init__", "errors", "alarms", "profile", "records", "distributed", "bars", "shipped", "files", "_timm",
    "data.images", "data.shards", "data.corruptions", "data.datasets", "data.glyphs", "data.held",
    "data.streams", "data.export",
    "augment", "params", "taps", "models", "losses", "schedule", "source", "fisher", "generator", "checkpoint",
    "optim.mgg", "optim", "_triton", "mlp", "kernels", "lowered", "vit", "fast", "methods.base", "methods",
    "watch", "guard", "recipes", "metrics", "evaluation",
    "meta", "store", "workers", "cluster", "experiments", "inputs", "lab", "bench", "progress",
    "report.summary", "report.paired", "report.words", "report.published", "report.tables", "report.charts",
    "report.examples", "report.page", "report.write", "report", "predictions", "running",
    "listing", "demo", "cli", "__main__",
]  # fmt: skip


def rank(module: str) -> int:
    """The place of a module, or of the package that it belongs to."""
    while module not in ORDER:
        assert "." in module, f"{module} has no place in ORDER"
        module = module.rpartition(".")[0]
    return ORDER.index(module)


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = name.removesuffix(".__init__") if name != "__init__" else name
        yield name, ast.parse(path.read_text())


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_upwards():
    known = {name for name, _ in modules()}
    for name, tree in modules():
        if name in ("__init__", "data", "methods"):
            continue
        for imported in imports(tree):
            inner = imported.removeprefix("mgtta.")
            if imported.startswith("mgtta.") and inner in known and inner not in ("data", "methods"):
                same_family = rank(inner) == rank(name)
                assert rank(inner) < rank(name) or same_family, f"{name} imports {inner}, which stands below it"


def test_some_packages_are_imported_in_one_place():
    homes = {"timm": "_timm", "torchvision": "_timm", "triton": "_triton"}
    for name, tree in modules():
        for root in {imported.split(".")[0] for imported in imports(tree)} & homes.keys():
            assert name == homes[root], f"{name}: import {root} from mgtta.{homes[root]}"


def test_public_names_are_there():
    for name in mgtta.__all__:
        assert getattr(mgtta, name).__module__.startswith("mgtta")
    assert set(mgtta.__all__) == set(mgtta._HOME)
    assert "create" in dir(mgtta)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, mgtta, mgtta.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_fast_path_is_loaded_for_those_alone_who_ask():
    code = (
        "import sys, mgtta, mgtta.bench; mgtta.create('tent', mgtta.load_model('glyphs_vit')); "
        "sys.exit(any(name in sys.modules for name in ('mgtta.fast', 'mgtta.vit', 'mgtta._triton', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_of_methods_are_short():
    for path in set((ROOT / "methods").glob("*.py")) - {ROOT / "methods" / "base.py"}:
        assert path.read_text().count("\n") < 150, path.name


def test_licences_and_pins_cover_what_is_needed():
    root = ROOT.parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    licences, pins = (root / "docs" / "licences.md").read_text(), (root / "constraints.txt").read_text().lower()
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert f"| {name.replace('_', '-')} |" in licences, f"{name}: python .ci/licences.py > docs/licences.md"
        assert f"\n{name.lower()}==" in pins, f"{name} is not pinned in constraints.txt"
