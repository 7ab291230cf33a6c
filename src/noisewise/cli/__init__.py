"""The command line: parse, call, print. Everything else lives in the package.

One file for each group of commands. A command imports what it calls when it is called: importing
torch takes a second, and `--help` or a mistyped option should not wait for it.
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
    audit_command,
    data_commands,
    encoder_commands,
    flower_commands,
    init_command,
    ledger_commands,
    noise_commands,
    planning_commands,
    reproduce_command,
    site_commands,
    statement_commands,
    training_commands,
    watch_command,
)
from noisewise.cli.common import app, say
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.storage import disk_full
from noisewise.text import printable

__all__ = [
    "app",
    "audit_command",
    "data_commands",
    "encoder_commands",
    "flower_commands",
    "init_command",
    "ledger_commands",
    "main",
    "noise_commands",
    "planning_commands",
    "reproduce_command",
    "site_commands",
    "statement_commands",
    "training_commands",
    "watch_command",
]

_INTERRUPTED = 130
_log = logging.getLogger(__name__)


class _OneLine(logging.Formatter):
    """One line for each message, whatever text it contains; only tracebacks have several."""

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
    """Run the command line. Errors that the user can correct are one line without a traceback.

    Exit codes: 2 for an invalid value, 1 for another error that the user can correct, such as a
    full disk, 130 after Ctrl-C.
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
        if isinstance(error, OSError) and error.filename is not None:  # a path that the user gave
            _end(f"{error.filename}: {error.strerror}", 1)
        raise  # a bug of ours: show the traceback


def _end(reason: object, code: int) -> NoReturn:
    """Print why the command fails, and exit."""
    _log.info("traceback:", exc_info=True)
    _say(f"noisewise: {reason}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.exit(code)
    # The rest of stdout cannot be written, as on a full disk; Python would report it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the full disk too
        say(text, err=True)
