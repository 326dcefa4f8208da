"""Tables in markdown and in LaTeX."""

from collections import Counter
from collections.abc import Iterable, Sequence

from mgtta.report.paired import differences
from mgtta.report.published import Beside, beside
from mgtta.report.streams import by_round, is_streams
from mgtta.report.summary import Figure, Record, Section, sections, unique
from mgtta.report.words import (
    bold,
    decimals,
    figure_words,
    footing_words,
    interval,
    named,
    notes,
    printed,
    rates,
    short,
    signed,
)

MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "\n": " ", "\r": " "}
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "∞": r"$\infty$",
    "−": "--",
    "\n": " ",
    "\r": " ",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def markdown(records: Sequence[Record], figure: str | None = None) -> str:
    """Return a table for each section of the records: one row a method, one column a domain, and the mean.

    A table has its title if there are several tables, or if it does not show accuracy.
    """
    found = sections(records)
    titles = Counter(section.title for section in found)
    return "\n\n".join(_titled(section, figure, titles) + _markdown_table(section, figure) for section in found)


def _titled(section: Section, figure: str | None, titles: Counter[str]) -> str:
    """Return the section's title where it is needed, and what else tells it from sections of the same title."""
    figure = figure or section.figure
    title = section.title
    if titles[title] > 1:
        title += f". {_markdown(footing_words(section))}"
    if figure != "top1":
        return f"{title}: {figure_words(figure)}\n\n"
    if len(titles) > 1 or titles[section.title] > 1:
        return f"{title}\n\n"
    return ""


def _markdown_table(section: Section, figure: str | None = None) -> str:
    if figure is None and is_streams(section):
        return _stream_tables(section)
    figures = section.figures(figure)
    columns = section.headings(figures)
    marked = section.best(figures, figure)
    figure = figure or section.figure
    lines = [_row(["method", *map(short, columns)]), "|---" * (len(columns) + 1) + "|"]
    for row, cells in figures.items():
        texts = [named(section, row)]
        for column in columns:
            text = _cell(cells.get(column), section.spread(column), "±", figure)
            if (row, column) in marked:
                text = f"**{text}**"
            texts.append(text)
        lines.append(_row(texts))
    return "\n".join(lines)


def _stream_tables(section: Section) -> str:
    """Return accuracy and ECE by kind of stream; after it, where there are rounds, the accuracy of each."""
    figures = section.figures("top1")
    errors = section.figures("ece")
    marked = section.best(figures, "top1")
    lines = ["Accuracy / expected calibration error (lower is better), in percent.", ""]
    lines += [_row(["method", *section.columns]), "|---" * (len(section.columns) + 1) + "|"]
    for row, cells in figures.items():
        texts = [row]
        for column in section.columns:
            text = _cell(cells.get(column), True, "±", "top1")
            if (row, column) in marked:
                text = f"**{text}**"
            texts.append(f"{text} / {_cell(errors[row].get(column), False, '', 'ece')}")
        lines.append(_row(texts))
    rounds = by_round(section)
    if rounds:
        longest = max(map(len, rounds.values()))
        lines += ["", "Accuracy of each round, in percent.", ""]
        lines += [_row(["method", *map(str, range(1, longest + 1))]), "|---" * (longest + 1) + "|"]
        lines += [_row([row, *(_cell(f, True, "±", "top1") for f in found)]) for row, found in rounds.items()]
    return "\n".join(lines)


def _cell(f: Figure | None, spread: bool, sign: str, figure: str) -> str:
    if f is None:
        return "–"
    text = decimals(f.mean, figure)
    if spread and f.std is not None:
        text += f" {sign} {decimals(f.std, figure)}"
    return text


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_markdown(cell) for cell in cells)} |"


def _markdown(text: str) -> str:
    """Return text that stays text within a table's cell, bold aside."""
    for character, safe in MARKDOWN.items():
        text = text.replace(character, safe)
    return text


def latex(records: Sequence[Record], figure: str | None = None) -> str:
    """Return the same tables in LaTeX; they need the package booktabs."""
    return "\n\n".join(_latex_table(section, figure) for section in sections(records))


def _latex_table(section: Section, figure: str | None = None) -> str:
    figures = section.figures(figure)
    columns = section.headings(figures)
    marked = section.best(figures, figure)
    figure = figure or section.figure
    by = ""
    if section.axis != "domain":
        by = f" by {section.axis_name}"
    caption = _latex(f"{section.title}: {figure_words(figure)}{by}. {footing_words(section)}.{rates(section)}")
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        f"\\caption{{{caption}}}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["method", *(_latex(short(c)) for c in columns)]) + r" \\",
        r"\midrule",
    ]
    for row, cells in figures.items():
        texts = [_latex(named(section, row))]
        for column in columns:
            text = _cell(cells.get(column), section.spread(column), r"$\pm$", figure).replace("–", "--")
            if (row, column) in marked:
                text = f"\\textbf{{{text}}}"
            texts.append(text)
        lines.append(" & ".join(texts) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _latex(text: str) -> str:
    """Return text that LaTeX prints as it is."""
    return "".join(LATEX.get(c, c) for c in text)


def markdown_report(found: Sequence[Section]) -> str:
    """Return all sections: footing, table, differences, published figures, and the command to repeat them."""
    parts = ["# Report of mgtta", ""]
    for section in found:
        parts += [f"## {section.title}", "", _markdown(footing_words(section)), ""]
        parts += [_markdown_table(section), "", f"{_markdown(notes(section))} {bold(section)}", ""]
        parts += _markdown_differences(section)
        for table in beside(section):
            number = f"Table {table.table}" if table.table[0].isdigit() else table.table
            differs = _markdown("; ".join(table.differs))
            parts += [f"Published, {number}", "", f"Not on the same footing: {differs}.", ""]
            parts += [*_markdown_beside(table), ""]
            parts += [f"- Published {_markdown(note)}" for note in table.notes]
            if table.notes:
                parts.append("")
        commands = unique((record.get("protocol") or {}).get("command") for record in section.records)
        parts += ["To repeat it:", "", *(f"    {str(c).replace(chr(10), ' ')}" for c in commands if c), ""]
    return "\n".join(parts)


def _markdown_differences(section: Section) -> list[str]:
    found = differences(section)
    if not found:
        return []
    how = "Student's t over domains, seeds averaged within each (over seeds where there is one domain)"
    lines = [f"Paired differences in points, over domain and seed; {how}:", ""]
    lines += ["| method | column | against | difference | 95 % interval | pairs |", "|---|---|---|---|---|---|"]
    lines += [_row([d.row, short(d.column), d.against, signed(d.mean), interval(d), str(d.pairs)]) for d in found]
    return [*lines, ""]


def _markdown_beside(table: Beside) -> list[str]:
    lines = [_row(["method", "", *map(short, table.columns)]), "|---" * (len(table.columns) + 2) + "|"]
    for row, own in table.printed.items():
        measured = table.measured.get(row, {})
        lines.append(_row([row, "measured", *(_cell(measured.get(c), False, "", c) for c in table.columns)]))
        lines.append(_row(["", "published", *(printed(own.get(c)) for c in table.columns)]))
    return lines


def latex_report(found: Sequence[Section]) -> str:
    """Return all sections' tables, for use in a document."""
    return "% needs \\usepackage{booktabs}\n\n" + "\n\n".join(_latex_table(section) for section in found) + "\n"
