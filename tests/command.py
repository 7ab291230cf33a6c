"""The command line in the tests' own process: the same entry point, without a new process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from noisewise.cli import main

__all__ = ["Answer", "Noisewise", "command"]


class Answer(NamedTuple):
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


Noisewise = Callable[..., Answer]
"""(words..., folder=None) -> Answer"""


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Noisewise:
    """The command `noisewise` with what was typed behind it."""

    def call(*words: object, folder: Path | None = None) -> Answer:
        monkeypatch.setattr(sys, "argv", ["noisewise", *map(str, words)])
        if folder is not None:
            monkeypatch.chdir(folder)
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Answer(code, *capsys.readouterr())

    return call
