"""The house: which package may import which, and timm and Triton have one door each."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import mgtta

ROOT = Path(mgtta.__file__).parent
MAY_IMPORT = {  # package -> the packages it may import, besides itself; none imports one that stands below it
    "_lib": "",
    "losses": "_lib",
    "data": "_lib",
    "models": "_lib data",
    "learned": "_lib",
    "adaptation": "_lib losses models learned",
    "fast": "_lib losses models learned adaptation",
    "methods": "_lib losses models learned adaptation fast",
    "evaluation": "_lib data adaptation",
    "training": "_lib losses data models learned adaptation methods evaluation",
    "running": "_lib data models learned adaptation methods evaluation",
    "serve": "_lib data models adaptation methods running",
    "report": "_lib data models adaptation methods evaluation",
    "bench": "_lib data models learned adaptation methods evaluation training report",
    "cli": "_lib data models learned adaptation methods evaluation training running serve report bench",
}
ROOT_FILES = {"__init__", "__main__", "losses"}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_root_has_three_files():
    assert {path.stem for path in ROOT.glob("*.py")} == ROOT_FILES


def test_packages_import_only_what_the_table_allows():
    for name, tree in modules():
        package = name.split(".")[0]
        if package in ("__init__", "__main__"):
            continue
        allowed = {package, *MAY_IMPORT[package].split()}
        for imported in imports(tree):
            parts = imported.split(".")
            if parts[0] == "mgtta" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] in allowed, f"{name} imports {imported}"


def test_the_table_has_no_cycle():
    order = list(MAY_IMPORT)
    for package, allowed in MAY_IMPORT.items():
        for other in allowed.split():
            assert order.index(other) < order.index(package), f"{package} may import {other}, which stands below it"


def test_some_packages_are_imported_in_one_place():
    homes = {"timm": "_lib.timm", "torchvision": "_lib.timm", "triton": "_lib.triton"}
    for name, tree in modules():
        for root in {imported.split(".")[0] for imported in imports(tree)} & homes.keys():
            assert name == homes[root], f"{name}: import {root} from mgtta.{homes[root]}"


def test_images_are_opened_in_one_place():
    """PIL's Image.open tries every format it knows; data/images.py limits formats and sizes."""
    assert [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "Image.open(" in path.read_text()] == [
        "data/images.py"
    ]


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
        "import sys, mgtta, mgtta.bench.run; mgtta.create('tent', mgtta.load_model('glyphs_vit')); "
        "names = ('mgtta.fast.engine', 'mgtta.fast.vit', 'mgtta._lib.triton', 'triton'); "
        "sys.exit(any(name in sys.modules for name in names))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_of_methods_are_short():
    for path in (ROOT / "methods").glob("*.py"):
        assert path.read_text().count("\n") < 150, path.name


def test_licences_and_pins_cover_what_is_needed():
    root = ROOT.parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    licences, pins = (root / "docs" / "licences.md").read_text(), (root / "constraints.txt").read_text().lower()
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert f"| {name.replace('_', '-')} |" in licences, f"{name}: python .ci/licences.py > docs/licences.md"
        assert f"\n{name.lower()}==" in pins, f"{name} is not pinned in constraints.txt"
