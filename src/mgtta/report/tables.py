"""Tables in markdown and in LaTeX."""

from collections.abc import Iterable, Sequence

from mgtta.report.paired import differences
from mgtta.report.published import Beside, beside
from mgtta.report.summary import MEAN, Figure, Record, Section, best, sections, unique
from mgtta.report.words import footing_words, headline, interval, notes, printed, short, signed


def markdown(records: Sequence[Record], figure: str | None = None) -> str:
    """The tables of the records, one for each section: one row a method, one column a domain, and the mean."""
    return "\n\n".join(_markdown_table(section, figure) for section in sections(records))


def _markdown_table(section: Section, figure: str | None = None) -> str:
    figures = section.figures(figure)
    figure = figure or section.figure
    columns = section.headings(figures)
    lines = [_row(["method", *map(short, columns)]), "|---" * (len(columns) + 1) + "|"]
    tops = {column: best(figures, column, figure) for column in columns}
    for row, cells in figures.items():
        texts = [_cell(cells.get(c), c == MEAN or section.axis != "domain", "{:.1f} ± {:.1f}") for c in columns]
        bold = (f"**{text}**" if row in tops[c] else text for c, text in zip(columns, texts, strict=True))
        lines.append(_row([row, *bold]))
    return "\n".join(lines)


def _cell(f: Figure | None, spread: bool, both: str) -> str:
    if f is None:
        return "–"
    return both.format(f.mean, f.std) if spread and f.std is not None else f"{f.mean:.1f}"


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
    figure = figure or section.figure
    columns = section.headings(figures)
    tops = {column: best(figures, column, figure) for column in columns}
    by = "" if section.axis == "domain" else f" by {section.axis_name}"
    caption = _latex(f"{section.title}: accuracy (%){by}. {footing_words(section)}.")
    lines = [
        r"\begin{table}[t]", r"\centering", f"\\caption{{{caption}}}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule",
        " & ".join(["method", *(_latex(short(c)) for c in columns)]) + r" \\", r"\midrule",
    ]  # fmt: skip
    for row, cells in figures.items():
        texts = [_cell(cells.get(c), c == MEAN or section.axis != "domain", r"{:.1f} $\pm$ {:.1f}") for c in columns]
        bold = (
            f"\\textbf{{{t}}}" if row in tops[c] else t.replace("–", "--") for c, t in zip(columns, texts, strict=True)
        )
        lines.append(" & ".join([_latex(row), *bold]) + r" \\")
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
        parts += [_markdown_table(section), "", notes(section), ""]
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
    lines = ["Paired differences in points (Student's t over domains, seeds averaged within each):", ""]
    lines += ["| method | column | against | difference | 95 % interval | pairs |", "|---|---|---|---|---|---|"]
    lines += [_row([d.row, short(d.column), d.against, signed(d.mean), interval(d), str(d.pairs)]) for d in found]
    return [*lines, ""]


def _markdown_beside(table: Beside) -> list[str]:
    lines = [_row(["method", "", *map(short, table.columns)]), "|---" * (len(table.columns) + 2) + "|"]
    for row, own in table.printed.items():
        measured = table.measured.get(row, {})
        lines.append(_row([row, "measured", *(_cell(measured.get(c), False, "") for c in table.columns)]))
        lines.append(_row(["", "published", *(printed(own.get(c)) for c in table.columns)]))
    return lines


def latex_report(found: Sequence[Section]) -> str:
    """All sections' tables, to be included in a document."""
    return "% needs \\usepackage{booktabs}\n\n" + "\n\n".join(_latex_table(section) for section in found) + "\n"
