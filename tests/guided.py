"""One reader of files under atheris: cases guided by the coverage of mgtta's code. `tests/fuzz.py` starts it.

python tests/guided.py image 10000
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mgtta"]):
    import fuzz


def main(name: str, runs: str) -> None:
    fuzz.prepare()
    with tempfile.TemporaryDirectory() as place:
        canary, corpus = Path(place) / "canary", Path(place) / "corpus"
        corpus.mkdir()
        for i, data in enumerate(fuzz.seeds(canary)[name]):
            (corpus / str(i)).write_bytes(data)

        def one(data: bytes) -> None:
            with tempfile.TemporaryDirectory(dir=place) as inner:
                fuzz.check(name, data, Path(inner))
            if canary.exists():
                raise AssertionError("code from the input ran")

        options = [f"-runs={runs}", "-seed=1", "-max_len=65536", "-rss_limit_mb=6144", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], one)
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main(*sys.argv[1:3])
