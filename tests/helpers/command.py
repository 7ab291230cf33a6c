"""Call the command line in the process of the test, through the same entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from noisewise.cli import main

__all__ = ["Answer", "Noisewise", "command"]


class Answer(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


Noisewise = Callable[..., Answer]
"""(arguments..., folder=None) -> Answer"""


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Noisewise:
    """Return a function that calls `noisewise` with arguments, optionally in another folder."""

    def call(*arguments: object, folder: Path | None = None) -> Answer:
        monkeypatch.setattr(sys, "argv", ["noisewise", *map(str, arguments)])
        if folder is not None:
            monkeypatch.chdir(folder)
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Answer(code, *capsys.readouterr())

    return call
