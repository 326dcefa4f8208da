"""The program `mgtta`: its commands, and what happens when one fails."""

import os
import signal
import sys
from typing import Annotated

import typer

from mgtta import __version__
from mgtta.cli.adapt import adapt
from mgtta.cli.bench import bare_ray, bench
from mgtta.cli.corrupt import corrupt
from mgtta.cli.demo import demo
from mgtta.cli.doctor import doctor
from mgtta.cli.errors import check_renamed, in_options
from mgtta.cli.fisher import fisher
from mgtta.cli.list import list_
from mgtta.cli.report import report
from mgtta.cli.serve import serve
from mgtta.cli.source import source
from mgtta.cli.train import train
from mgtta.cli.tune import tune

EXPECTED = (ValueError, TypeError, OSError, RuntimeError, ImportError)  # errors whose text says what to do
ERROR_CODE = 2
TERMINATED_CODE = 143  # 128 + SIGTERM

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Adapt an image classifier online, without labels, while it works on shifted data.",
)
for command in (adapt, tune, train, source, fisher, corrupt, bench, report, serve, list_, doctor, demo):
    app.command(command.__name__.rstrip("_"))(command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command in sys.argv. An error is one line without a traceback; MGTTA_TRACE=1 shows the traceback."""
    sys.path.append(os.getcwd())  # where --model package.module:build looks last
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED_CODE))  # so that temporary files are removed
    try:
        check_renamed(sys.argv[1:])
        app(bare_ray(sys.argv[1:]))
    except EXPECTED as error:
        if os.environ.get("MGTTA_TRACE"):
            raise
        typer.secho(f"{_rank()}error: {in_options(str(error))}", fg="red", err=True)
        sys.exit(ERROR_CODE)
    except SystemExit as ended:
        if ended.code or not _rank():
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # all is done; while Python shuts down, threads of torch.distributed may still abort a rank


def _rank() -> str:
    """Return the rank of this process as the start of a message; "" if torchrun has not started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ""
    return f"rank {os.environ['RANK']}: "
