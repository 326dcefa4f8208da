"""Writes the registry of recipes into docs/methods.md, between its two marks, and what `mgtta list` shows.

python docs/methods.py
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgtta._lib.names import spelled
from mgtta._lib.shipped import shipped
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.datasets import KINDS
from mgtta.learned.files import load_generator
from mgtta.methods.registry import AUTHORS, GRADIENTS, MGTTA, REQUIRED, RESNETS, SETS, Recipe, recipes

PAGE = Path(__file__).with_suffix(".md")
CATALOGUE = PAGE.parent.parent / "src" / "mgtta" / "cli" / "catalogue.json"
START, END = "<!-- recipes: written by docs/methods.py -->", "<!-- recipes: end -->"


def registry() -> str:
    """Return all recipes, in the registry's order, as markdown."""
    return "\n\n".join([table(), *map(described, recipes().values())])


def table() -> str:
    """Return which recipe works with which option."""
    options = list(next(iter(recipes().values())).works_with)
    lines = [f"| | {' | '.join(options)} |", f"|---|{'---|' * len(options)}"]
    for recipe in recipes().values():
        marks = ["yes" if works else "" for works in recipe.works_with.values()]
        lines.append(f"| {spelled(recipe.name)} | {' | '.join(marks)} |")
    words = "What each recipe works with; anything else is refused by name when the method is created or exported."
    return "\n".join([words, "", *lines])


def described(recipe: Recipe) -> str:
    needs = ", ".join(recipe.needs) or "nothing besides the model"
    lines = [f"### {spelled(recipe.name)}", "", recipe.what, ""]
    lines += [f"- **Paper:** {paper(title, number)}" for title, number in recipe.papers]
    lines += [
        f"- **Kind:** {recipe.kind}",
        f"- **Needs:** {needs}",
        f"- **Cost:** {passes(recipe)}",
        f"- {followed(recipe)} {listed(recipe.settings) or 'none'}",
    ]
    if recipe.options:
        lines.append(f"- **Options** (0 switches one off): {listed(recipe.options)}")
    if recipe.resnets:
        lines.append(f"- **For {RESNETS}:** {listed(recipe.resnets)}")
    if recipe.mgtta is not None:
        lines.append(f"- **Settings, `mgtta`** ({SETS[MGTTA]}): {listed(changed(recipe)) or 'the same'}")
    if recipe.tries:
        lines.append(f"- **Tried by a sweep besides `lr`:** {tried(recipe)}")
    if recipe.more:
        lines += ["", explained(recipe.more)]
    return "\n".join(lines)


def passes(recipe: Recipe) -> str:
    """Return the cost of a recipe in words."""
    forward, backward = recipe.cost
    if not backward:
        return f"{forward} forward passes an image, at most" if forward > 1 else "1 forward pass an image"
    return f"{forward} forward and {backward} backward passes an image, at most"


def followed(recipe: Recipe) -> str:
    """Return the words on whose settings the defaults are."""
    if recipe.code:
        return f"**Settings, `{AUTHORS}`** ({recipe.code}):"
    return "**Settings:**"


def changed(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the set "mgtta" that are not the authors'."""
    return {key: value for key, value in recipe.at(MGTTA).settings.items() if value != recipe.settings[key]}


def listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{setting(key, default)}`" for key, default in settings.items())


def tried(recipe: Recipe) -> str:
    return ", ".join(f"`{key}`: {', '.join(f'{value:g}' for value in values)}" for key, values in recipe.tries.items())


def explained(text: str) -> str:
    """The rest of a docstring, with its lines on settings as a list."""
    return re.sub(r"^([a-z_, ]+): ", lambda m: f"- `{m[1].replace(', ', '`, `')}`: ", text.strip(), flags=re.MULTILINE)


def paper(title: str, number: str | None) -> str:
    return f"{title}, [arXiv {number}](https://arxiv.org/abs/{number})" if number else title


def setting(key: str, default: Any) -> str:
    if default is REQUIRED:
        return key
    return f"{key}={default:g}" if isinstance(default, float) else f"{key}={default!r}".replace("'", '"')


def catalogue() -> str:
    """Return what `mgtta list` shows, as JSON, so that the command does not import torch."""
    found = {
        "methods": [entry(recipe) for recipe in recipes().values()],
        "generators": {name: about_generator(name) for name in shipped("generators")},
        "data": KINDS,
        "corruptions": list(CORRUPTIONS),
        "validation corruptions": list(VALIDATION_CORRUPTIONS),
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def entry(recipe: Recipe) -> dict[str, Any]:
    """Return one method of the catalogue."""
    needs = [need for need in recipe.needs if need != GRADIENTS]
    return {
        "name": spelled(recipe.name),
        "what": recipe.what,
        "kind": recipe.kind,
        "passes": recipe.cost,
        "needs": needs,
        "settings": [setting(key, value) for key, value in recipe.settings.items()],
        "resnets": [setting(key, value) for key, value in recipe.resnets.items()],
        "mgtta": None if recipe.mgtta is None else [setting(*item) for item in changed(recipe).items()],
    }


def about_generator(name: str) -> str:
    """Return the size and the training of a shipped generator."""
    generator = load_generator(name)
    about = f"hidden size {generator.hidden_size}, memory {generator.memory_kind}"
    protocol = str(generator.about.get("protocol", ""))
    return f"{about}; {protocol}" if protocol else about


def updated(page: str) -> str:
    """The page with the recipes as they are now."""
    head, rest = page.split(START)
    return f"{head}{START}\n\n{registry()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    CATALOGUE.write_text(catalogue(), encoding="utf-8")
