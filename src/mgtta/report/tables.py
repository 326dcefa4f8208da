"""Tables in markdown and in LaTeX."""

from collections.abc import Iterable, Sequence

from mgtta.report.paired import differences
from mgtta.report.published import Beside, beside
from mgtta.report.summary import Figure, Record, Section, sections, unique
from mgtta.report.words import (
    bold,
    decimals,
    figure_words,
    footing_words,
    headline,
    interval,
    notes,
    printed,
    rates,
    short,
    signed,
)


def markdown(records: Sequence[Record], figure: str | None = None) -> str:
    """The tables of the records, one for each section: one row a method, one column a domain, and the mean. Each has
    its title, where there are several, or where it does not show accuracy."""
    found = sections(records)
    return "\n\n".join(_titled(section, figure, len(found) > 1) + _markdown_table(section, figure) for section in found)


def _titled(section: Section, figure: str | None, several: bool) -> str:
    words = "" if (figure or section.figure) == "top1" else f": {figure_words(figure or section.figure)}"
    return f"{section.title}{words}\n\n" if several or words else ""


def _markdown_table(section: Section, figure: str | None = None) -> str:
    figures = section.figures(figure)
    columns, marked = section.headings(figures), section.best(figures, figure)
    lines = [_row(["method", *map(short, columns)]), "|---" * (len(columns) + 1) + "|"]
    for row, cells in figures.items():
        texts = {c: _cell(cells.get(c), section.spread(c), "±", figure or section.figure) for c in columns}
        lines.append(_row([row, *(f"**{text}**" if (row, c) in marked else text for c, text in texts.items())]))
    return "\n".join(lines)


def _cell(f: Figure | None, spread: bool, sign: str, figure: str) -> str:
    if f is None:
        return "–"
    mean = decimals(f.mean, figure)
    return f"{mean} {sign} {decimals(f.std, figure)}" if spread and f.std is not None else mean


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_markdown(cell) for cell in cells)} |"


def _markdown(text: str) -> str:
    """Text that stays text within a table's cell, bold aside."""
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " "), ("\r", " ")):
        text = text.replace(character, safe)
    return text


def latex(records: Sequence[Record], figure: str | None = None) -> str:
    """The same tables in LaTeX; they need the package booktabs."""
    return "\n\n".join(_latex_table(section, figure) for section in sections(records))


def _latex_table(section: Section, figure: str | None = None) -> str:
    figures = section.figures(figure)
    columns, marked = section.headings(figures), section.best(figures, figure)
    figure = figure or section.figure
    by = "" if section.axis == "domain" else f" by {section.axis_name}"
    caption = _latex(f"{section.title}: {figure_words(figure)}{by}. {footing_words(section)}.{rates(section)}")
    lines = [
        r"\begin{table}[t]", r"\centering", f"\\caption{{{caption}}}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule",
        " & ".join(["method", *(_latex(short(c)) for c in columns)]) + r" \\", r"\midrule",
    ]  # fmt: skip
    for row, cells in figures.items():
        texts = {c: _cell(cells.get(c), section.spread(c), r"$\pm$", figure) for c in columns}
        bolds = (f"\\textbf{{{t}}}" if (row, c) in marked else t.replace("–", "--") for c, t in texts.items())
        lines.append(" & ".join([_latex(row), *bolds]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "∞": r"$\infty$",
        "−": "--", "<": r"\textless{}", ">": r"\textgreater{}", "\n": " ", "\r": " ",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }  # fmt: skip
    return "".join(special.get(c, c) for c in text)


def markdown_report(found: Sequence[Section]) -> str:
    """All sections: summary, table, differences, published figures, protocol."""
    parts = ["# Report of mgtta", ""]
    for section in found:
        parts += [f"## {section.title}", "", _markdown(footing_words(section)), ""]
        parts += [f"- {_markdown(words)}" for words in headline(section)] + [""]
        parts += [_markdown_table(section), "", f"{_markdown(notes(section))} {bold(section)}", ""]
        parts += _markdown_differences(section)
        for table in beside(section):
            parts += [f"Published, Table {table.table}" if table.table[0].isdigit() else f"Published, {table.table}"]
            parts += ["", "Not on the same footing: " + _markdown("; ".join(table.differs)) + ".", ""]
            parts += [*_markdown_beside(table), ""]
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
    """All sections' tables, to be included in a document."""
    return "% needs \\usepackage{booktabs}\n\n" + "\n\n".join(_latex_table(section) for section in found) + "\n"
