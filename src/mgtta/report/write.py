"""Write the three files of a report from a folder of records."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgtta._lib.files import atomic
from mgtta.evaluation.record import checked, complete_records
from mgtta.report.examples import Example, embedded_examples, own_examples
from mgtta.report.page import page
from mgtta.report.summary import sections
from mgtta.report.tables import latex_report, markdown_report


def write_report(
    runs: str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    examples: bool | Sequence[Example] = True,
    data: str | None = None,
    **pictures: Any,
) -> Path:
    """Write report.md, report.tex and report.html from a folder of records, and return the page's path.

    Args:
        runs: the folder that `mgtta bench` wrote.
        out: the folder of the report; by default the same one.
        examples: images for the page. True renders some if the records are of the embedded data and model, which
            takes some seconds, or if `data` names images.
        data: the images of the records, to render examples of them.
        pictures: with `data`, what else `own_examples` takes: checkpoint, source, clean.
    """
    folder = Path(runs)
    path = folder / "records.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no records in {folder}: name the folder that `mgtta bench` wrote (its --out)")
    records = [record for cell in complete_records(path.read_bytes()).values() for record in cell]
    if not records:
        raise ValueError(f"{path} holds no finished records yet: let `mgtta bench` finish a cell")
    found = sections(checked(records))
    if examples is True and data is not None:
        examples = own_examples(records, data, **pictures)
    elif examples is True:
        examples = embedded_examples(records)
    out = Path(out or folder)
    texts = {
        "report.md": markdown_report(found),
        "report.tex": latex_report(found),
        "report.html": page(found, examples or ()),
    }
    for name, text in texts.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return out / "report.html"
