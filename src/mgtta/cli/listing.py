"""The text of `mgtta list`, at most 80 columns wide. It comes from catalogue.json, so that torch is not imported."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgtta._lib.errors import unknown
from mgtta._lib.shipped import shipped

CATALOGUE = Path(__file__).with_name("catalogue.json")  # written by docs/methods.py
WIDEST = 80  # columns
COLUMNS = (14, 14, 9)  # widths of name, kind and passes
SHIPPED = {"glyphs_vit": "rendered characters", "patterns_vit": "rendered patterns"}  # model -> its images


def listed(what: str = "") -> str:
    """Return the text of `mgtta list WHAT`; everything in short if `what` is empty."""
    catalogue = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    parts = {
        "methods": _methods_in_full,
        "generators": _generators,
        "models": _models,
        "data": _data,
    }
    if what:
        if what not in parts:
            raise unknown("list", what, parts)
        return parts[what](catalogue)
    rest = {
        "generators": catalogue["generators"],
        "models": [*shipped("models"), "any timm name"],
        "data": catalogue["data"],
        "corruptions": catalogue["corruptions"],
    }
    lines = [_wrapped(f"{name.capitalize()}: {', '.join(found)}.") for name, found in rest.items()]
    more = "More: `mgtta list methods`, `generators`, `models`, `data`."
    return "\n".join([_methods(catalogue), "", *lines, more])


def _methods(catalogue: Mapping[str, Any]) -> str:
    """Return one line for each method."""
    rows = [_row("method", "kind", "passes", "needs")]
    rows += [_row(m["name"], m["kind"], _passes(m), ", ".join(m["needs"]) or "-") for m in catalogue["methods"]]
    about = "Methods: mgtta adapt --method NAME. Passes: forward + backward, of an image in batches of 16, at most."
    return "\n".join([_wrapped(about), *rows])


def _row(name: str, kind: str, passes: str, needs: str) -> str:
    first, second, third = COLUMNS
    return f"  {name:<{first}}{kind:<{second}}{passes:<{third}}{needs}"


def _passes(method: Mapping[str, Any]) -> str:
    forward, backward = method["passes"]
    return f"{forward} + {backward}" if backward else str(forward)


def _methods_in_full(catalogue: Mapping[str, Any]) -> str:
    """Return a paragraph for each method: what it is, and its settings."""
    about = (
        "Methods: mgtta adapt --method NAME --set SETTING=VALUE. The settings are the authors'. "
        "NAME@mgtta has those of the MGTTA paper."
    )
    return "\n\n".join([_wrapped(about), *map(_paragraph, catalogue["methods"])])


def _paragraph(method: Mapping[str, Any]) -> str:
    needs = ", ".join(method["needs"]) or "nothing"
    lines = [f"{method['name']}: {method['kind']}, passes {_passes(method)}, needs {needs}"]
    lines.append(_wrapped(method["what"], "  "))
    lines.append(_wrapped(f"settings: {_words(method['settings'])}", "  "))
    if method["resnets"]:
        lines.append(_wrapped(f"with BatchNorm or GroupNorm: {_words(method['resnets'])}", "  "))
    if method["mgtta"] is not None:
        lines.append(_wrapped(f"{method['name']}@mgtta: {_words(method['mgtta'], 'the same')}", "  "))
    return "\n".join(lines)


def _words(settings: Sequence[str], none: str = "none") -> str:
    return ", ".join(settings) or none


def _generators(catalogue: Mapping[str, Any]) -> str:
    rows = [_wrapped(f"{name}: {about}", "  ") for name, about in catalogue["generators"].items()]
    return "\n".join([_wrapped("Generators: mgtta adapt --generator NAME, or a file."), *rows])


def _models(_catalogue: Mapping[str, Any]) -> str:
    rows = [_wrapped(f"{name}: comes with the package, for {SHIPPED[name]}", "  ") for name in shipped("models")]
    rows.append(_wrapped("any timm name: timm.list_models() shows them", "  "))
    return "\n".join([_wrapped("Models: mgtta adapt --model NAME."), *rows])


def _data(catalogue: Mapping[str, Any]) -> str:
    rows = [_wrapped(f"{kind}: {text}", "  ") for kind, text in catalogue["data"].items()]
    rows += [
        _wrapped(f"{name}: {', '.join(catalogue[name])}", "  ") for name in ("corruptions", "validation corruptions")
    ]
    return "\n".join([_wrapped("Data: mgtta adapt DATA."), *rows])


def _wrapped(text: str, indent: str = "") -> str:
    """Return the text in lines that fit the terminal, at most WIDEST columns; later lines are indented further."""
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    further = f"{indent}  " if indent else ""
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)


def show(*tables: Any) -> None:
    """Print rich tables."""
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)
