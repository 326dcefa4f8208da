"""Records -> tables in markdown and LaTeX, and one self-contained HTML page."""

from mgtta.report.summary import Figure, Section, sections
from mgtta.report.tables import latex, markdown
from mgtta.report.write import write_report

__all__ = ["Figure", "Section", "latex", "markdown", "sections", "write_report"]
