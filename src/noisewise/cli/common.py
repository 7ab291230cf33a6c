"""What the commands share: the app, options with their help texts, and how to read them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from noisewise.checks import repeated
from noisewise.errors import InvalidValueError
from noisewise.text import printable

__all__ = [
    "DATA",
    "PAPER",
    "SERVER",
    "SITE",
    "TRAIN",
    "AsJson",
    "Config",
    "Output",
    "Protected",
    "Set",
    "SetSeveral",
    "Workers",
    "app",
    "output_folder",
    "overrides",
    "say",
    "swept_values",
    "warn",
    "words",
]

TRAIN = "Train and compare"
DATA = "Data and estimates"
SITE = "A site and its budget"
SERVER = "A server of a real federation"
PAPER = "The paper"


class Protected(StrEnum):
    """What a budget protects, one of `noisewise.data.specs.UNITS`."""

    RECORD = "record"
    PERSON = "person"


class _Grouped(TyperGroup):
    """Lists the commands of one panel together, in the order in which users need them."""

    _first = (
        "init",
        "run",
        "compare",
        "watch",
        "report",
        "methods",
        "plan",
        "population",
        "attacks",
        "data",
    )
    _panels = (TRAIN, DATA, SITE, SERVER, PAPER)

    def list_commands(self, ctx: click.Context) -> list[str]:
        def place(name: str) -> tuple[int, int]:
            panel = getattr(self.commands[name], "rich_help_panel", TRAIN)
            position = self._first.index(name) if name in self._first else len(self._first)
            group = self._panels.index(panel) if panel in self._panels else len(self._panels)
            return group, position

        return sorted(self.commands, key=place)


app = typer.Typer(
    name="noisewise",
    cls=_Grouped,
    help="Federated learning in which every client has its own privacy budget and nobody trusts "
    "the server.",
    no_args_is_help=True,
    suggest_commands=False,  # click does that
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(help="A TOML config; see configs/demo.toml.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for results. Default: runs/CONFIG.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Processes. Default: the number of cores.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a config field: --set training.rounds=10 (repeatable)."),
]
SetSeveral = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace a config field (repeatable); KEY=A,B,C runs a comparison for each value, and "
        "several such options for each combination.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, with every control character except line ends made visible.

    All commands print through this function, since names and paths come from other people's files.
    """
    typer.echo(printable(text, lines=True), err=err, nl=nl)


def overrides(settings: list[str] | None) -> dict[str, Any]:
    """Read KEY=VALUE pairs; values are TOML, and a word that is not TOML is a string."""
    values = {}
    for key, text in map(_pair, settings or []):
        values[key] = _toml_value(text)
        several = [_toml_value(piece) for piece in _split(text)]
        if len(several) > 1 and not any(isinstance(value, str) for value in several):
            raise InvalidValueError(
                "--set", f"{key}={text}", "must be one value here; only `compare` sweeps several"
            )
    return values


def words(option: str, text: str | None) -> list[str] | None:
    """Read a comma-separated option; None if it was not given.

    Raises:
        InvalidValueError: it has no word, or a word is listed twice.

    Example:
        >>> words("--methods", "RobustHDP, WeiAvg")
        ['RobustHDP', 'WeiAvg']
    """
    if text is None:
        return None
    listed = [word.strip() for word in text.split(",") if word.strip()]
    if not listed:
        raise InvalidValueError(option, text, "must be one or more names, separated by commas")
    if (word := repeated(listed)) is not None:
        raise InvalidValueError(option, text, f"{word} is listed twice")
    return listed


def swept_values(settings: list[str] | None) -> dict[str, list[Any]]:
    """Read KEY=VALUE or KEY=A,B,C; commas in brackets, braces or quotes belong to a value.

    Example:
        >>> swept_values(["a.b=1,2", "c=[3,4]", 'd="x,y"'])
        {'a.b': [1, 2], 'c': [[3, 4]], 'd': ['x,y']}
    """
    fields = {}
    for key, text in map(_pair, settings or []):
        pieces = _split(text)
        values = [_toml_value(piece) for piece in pieces]
        if len(pieces) > 1:
            if not all(piece.strip() for piece in pieces):
                raise InvalidValueError("--set", f"{key}={text}", "has an empty value")
            if len({repr(value) for value in values}) < len(values):
                raise InvalidValueError("--set", f"{key}={text}", "lists a value twice")
        fields[key] = values
    return fields


def _pair(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise InvalidValueError("--set", setting, "must be KEY=VALUE")
    return key.strip(), value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _split(text: str) -> list[str]:
    """Split text at its outermost commas."""
    pieces, depth, quote, escaped = [""], 0, "", False
    for letter in text:
        if quote:
            closes = letter == quote and not escaped
            escaped = letter == "\\" and quote == '"' and not escaped
            quote = "" if closes else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            pieces.append("")
            continue
        pieces[-1] += letter
    return pieces


def warn(warnings: Iterable[str]) -> None:
    """Print each warning as a line on stderr, apart from the results on stdout."""
    for warning in warnings:
        say(f"WARNING: {warning}", err=True)


def output_folder(output: Path | None, config: Path) -> Path:
    """The folder for results: ``--output``, or one in runs/ with the config's name."""
    return output or Path("runs") / config.stem
