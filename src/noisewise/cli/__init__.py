"""The command line: parse, call, print. Everything else lives in the package.

One file for each group of commands. They import what they call when they are called: torch alone
takes a second, and `--help` or a mistyped option should not have to wait for it.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from noisewise import __version__
from noisewise.cli import (
    attacks,
    audit,
    clients,
    data,
    flower,
    ledger,
    noise,
    report,
    reproduce,
    training,
)
from noisewise.cli.common import app
from noisewise.errors import InvalidValueError, NoisewiseError

__all__ = [
    "app",
    "attacks",
    "audit",
    "clients",
    "data",
    "flower",
    "ledger",
    "main",
    "noise",
    "report",
    "reproduce",
    "training",
]

_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
    if version:
        typer.echo(f"noisewise {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: errors that the user can mend are one line and exit code 2, no traceback."""
    try:
        app()
    except InvalidValueError as error:
        typer.echo(f"noisewise: {error}", err=True)
        sys.exit(2)
    except NoisewiseError as error:
        typer.echo(f"noisewise: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # nothing that a user named: a fault of ours, to be seen whole
            raise
        typer.echo(f"noisewise: {error.filename}: {error.strerror}", err=True)
        sys.exit(1)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer turns Ctrl-C into this
            typer.echo("\nnoisewise: interrupted; the same command goes on from here", err=True)
        raise
