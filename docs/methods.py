"""Writes the registry of recipes into docs/methods.md, between its two marks: python docs/methods.py"""

import inspect
import re
from pathlib import Path
from typing import Any

from mgtta.methods.create import RECIPES, recipe_settings

PAGE = Path(__file__).with_suffix(".md")
START, END = "<!-- recipes: written by docs/methods.py -->", "<!-- recipes: end -->"
MGTTA = ("Learning to Generate Gradients for Test-Time Adaptation via Test-Time Training Layers", "2412.16901")
# recipe -> its papers: title, and number at arXiv where it is there
PAPERS: dict[str, list[tuple[str, str | None]]] = {
    "noadapt": [],
    "bn": [
        ("Evaluating Prediction-Time Batch Normalization for Robustness under Covariate Shift", "2006.10963"),
        ("Improving robustness against common corruptions by covariate shift adaptation", "2006.16971"),
    ],
    "lame": [("Parameter-free Online Test-time Adaptation", "2201.05718")],
    "t3a": [("Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization", None)],
    "foa": [("Test-Time Model Adaptation with Only Forward Passes", "2404.01650")],
    "tent": [("Tent: Fully Test-Time Adaptation by Entropy Minimization", "2006.10726")],
    "eata": [("Efficient Test-Time Model Adaptation without Forgetting", "2204.02610")],
    "sar": [("Towards Stable Test-Time Adaptation in Dynamic Wild World", "2302.12400")],
    "deyo": [
        ("Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors", "2403.07366")
    ],
    "cotta": [("Continual Test-Time Domain Adaptation", "2203.13591")],
    "spa": [("Self-Bootstrapping for Versatile Test-Time Adaptation", "2504.08010")],
    "roid": [
        (
            "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior Correction",
            "2306.00650",
        )
    ],
    "eq7_sgd": [MGTTA],
    "eq7_adam": [MGTTA],
    "mgtta": [MGTTA],
    "mgtta_lstm": [MGTTA],
    "mgtta_plus": [],
}


def recipes() -> str:
    """All recipes, in the registry's order, as markdown."""
    if missing := RECIPES.keys() - PAPERS.keys():
        raise ValueError(f"name the papers of {', '.join(sorted(missing))} in PAPERS of docs/methods.py")
    return "\n\n".join(map(described, RECIPES))


def described(name: str) -> str:
    recipe, settings = RECIPES[name], recipe_settings(name)
    what, _, more = (inspect.getdoc(recipe) or "").partition("\n\n")
    needs = ", ".join(inspect.signature(recipe).return_annotation.needs) or "nothing beside the model"
    shown = ", ".join(f"`{setting(key, default)}`" for key, default in settings.items()) or "none"
    lines = [f"### {name}", "", " ".join(what.split()), ""]
    lines += [f"- **Paper:** {paper(title, number)}" for title, number in PAPERS[name]]
    lines += [f"- **Needs:** {needs}", f"- **Settings:** {shown}"]
    return "\n".join([*lines, *(["", explained(more)] if more else [])])


def explained(text: str) -> str:
    """The rest of a docstring, with its lines on settings as a list."""
    return re.sub(r"^([a-z_, ]+): ", lambda m: f"- `{m[1].replace(', ', '`, `')}`: ", text.strip(), flags=re.MULTILINE)


def paper(title: str, number: str | None) -> str:
    return f"{title}, [arXiv {number}](https://arxiv.org/abs/{number})" if number else title


def setting(key: str, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return key
    return f"{key}={default:g}" if isinstance(default, float) else f"{key}={default!r}".replace("'", '"')


def updated(page: str) -> str:
    """The page with the recipes as they are now."""
    head, rest = page.split(START)
    return f"{head}{START}\n\n{recipes()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
