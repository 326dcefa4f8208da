"""Writes the registry of recipes into docs/methods.md, between its two marks: python docs/methods.py"""

import re
from pathlib import Path
from typing import Any

from mgtta.methods.registry import REQUIRED, Recipe, recipes

PAGE = Path(__file__).with_suffix(".md")
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
        lines.append(f"| {recipe.name} | {' | '.join(marks)} |")
    words = "What each recipe works with; anything else is refused by name when the method is created or exported."
    return "\n".join([words, "", *lines])


def described(recipe: Recipe) -> str:
    needs = ", ".join(recipe.needs) or "nothing besides the model"
    settings = ", ".join(f"`{setting(key, default)}`" for key, default in recipe.settings.items()) or "none"
    lines = [f"### {recipe.name}", "", recipe.what, ""]
    lines += [f"- **Paper:** {paper(title, number)}" for title, number in recipe.papers]
    lines += [f"- **Needs:** {needs}", f"- **Settings:** {settings}"]
    if recipe.more:
        lines += ["", explained(recipe.more)]
    return "\n".join(lines)


def explained(text: str) -> str:
    """The rest of a docstring, with its lines on settings as a list."""
    return re.sub(r"^([a-z_, ]+): ", lambda m: f"- `{m[1].replace(', ', '`, `')}`: ", text.strip(), flags=re.MULTILINE)


def paper(title: str, number: str | None) -> str:
    return f"{title}, [arXiv {number}](https://arxiv.org/abs/{number})" if number else title


def setting(key: str, default: Any) -> str:
    if default is REQUIRED:
        return key
    return f"{key}={default:g}" if isinstance(default, float) else f"{key}={default!r}".replace("'", '"')


def updated(page: str) -> str:
    """The page with the recipes as they are now."""
    head, rest = page.split(START)
    return f"{head}{START}\n\n{registry()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
