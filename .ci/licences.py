"""Prints docs/licences.md: the packages that mgtta needs, and their licences by their own metadata.

python .ci/licences.py > docs/licences.md
"""

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent


def licence(package: str) -> str:
    about = metadata.metadata(package)
    classified = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or [] if c.startswith("License")]
    named = (about.get("License") or "").strip()
    return about.get("License-Expression") or ", ".join(classified) or named.splitlines()[0]


def needed(package: str, found: set[str]) -> set[str]:
    """Return the package and everything that it needs at run time, as far as it is installed."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name in found:
        return found
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return found
    found.add(name)
    for requirement in requirements:
        if "extra ==" not in requirement:
            needed(re.match(r"[\w.-]+", requirement)[0], found)
    return found


def main() -> None:
    print(
        "# Licences\n\nmgtta is under Apache-2.0. What it needs at run time, with the versions of `constraints.txt`:\n"
    )
    print("| package | version | licence |\n|---|---|---|")
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for name in sorted(needed("mgtta", set()) & {re.sub(r"[-_.]+", "-", pin).lower() for pin in pins}):
        print(f"| {name} | {metadata.version(name).split('+')[0]} | {licence(name).replace('|', '/')} |")
    print(
        "\nThe characters of the embedded data set are drawn in fonts that come with matplotlib: DejaVu (Bitstream Vera"
        "\nlicence), STIX (SIL Open Font Licence) and Computer Modern (BaKoMa).\n\nCommand: `python .ci/licences.py > "
        "docs/licences.md`"
    )


if __name__ == "__main__":
    main()
