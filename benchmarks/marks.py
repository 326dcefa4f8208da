"""A page's text between two marks, which a program writes."""


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between <!-- NAME:start --> and <!-- NAME:end -->."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, rest = page.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{text}\n{end}{after}"
