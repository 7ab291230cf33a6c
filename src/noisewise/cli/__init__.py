"""The command line: parse, call, print. Everything else lives in the package.

One file for each group of commands. They import what they call when they are called: torch alone
takes a second, and `--help` or a mistyped option should not have to wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Annotated, Any, NoReturn

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
from noisewise.cli.common import app, say
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.storage import disk_full
from noisewise.text import printable

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
_log = logging.getLogger(__name__)


class _OneLine(logging.Formatter):
    """A line for each message, whatever it repeats; only tracebacks have several."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei), lines=True)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    logging.getLogger("absl").setLevel(logging.ERROR)
    if version:
        say(f"noisewise {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: errors that the user can correct are one line and no traceback.

    Exit codes: 2 for a wrong value; 1 for anything else that the user can correct, a full disk
    included; 130 after Ctrl-C.
    """
    try:
        app()
    except InvalidValueError as error:
        _end(error, 2)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer turns Ctrl-C into this
            _say("\nnoisewise: interrupted; run the same command again to resume")
        raise
    except Exception as error:
        full = disk_full(error)
        if full is not None:
            _end(full, 1)
        if isinstance(error, NoisewiseError):
            _end(error, 1)
        if isinstance(error, OSError) and error.filename is not None:  # something the user named
            _end(f"{error.filename}: {error.strerror}", 1)
        raise  # a fault of ours, to be seen whole


def _end(reason: object, code: int) -> NoReturn:
    """Say why the command ends, and end."""
    _log.info("where it happened:", exc_info=True)
    _say(f"noisewise: {reason}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.exit(code)
    # What is left cannot be written, as on a full disk: Python would complain about it at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the full disk too
        say(text, err=True)
