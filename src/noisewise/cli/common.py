"""What commands share: the app, options with their help texts, and how they are read."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from noisewise.errors import InvalidValueError

__all__ = [
    "AsJson",
    "Config",
    "Output",
    "Set",
    "Workers",
    "app",
    "cores",
    "output_folder",
    "overrides",
]

app = typer.Typer(
    name="noisewise",
    help="Federated learning in which every client has its own privacy budget and nobody trusts "
    "the server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(help="A TOML config; see configs/demo.toml.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for results. Default: runs/CONFIG.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes. Default: the number of cores.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a config field: --set training.rounds=10 (repeatable)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def overrides(settings: list[str] | None) -> dict[str, Any]:
    """Read KEY=VALUE pairs; values are TOML, and a word that is not TOML is a string."""
    found: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidValueError("--set", setting, "must be KEY=VALUE")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value
    return found


def output_folder(output: Path | None, config: Path) -> Path:
    """Where results go: ``--output``, or a folder below runs/ that is named like the config."""
    return output or Path("runs") / config.stem


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
