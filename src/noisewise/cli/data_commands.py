"""`noisewise data`: datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import AsJson, app, say

data_app = typer.Typer(help="List, download and verify datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DatasetName = Annotated[str, typer.Argument(help="A name from `noisewise data list`.")]


@data_app.command("list")
def data_list_command(as_json: AsJson = False) -> None:
    """List the datasets, and which of them are in the cache."""
    from noisewise.data import list_datasets

    rows = list_datasets()
    if as_json:
        fields = ("name", "n_train", "n_test", "n_classes", "state")
        say(json.dumps([{name: getattr(row, name) for name in fields} for row in rows]))
        return
    say(f"{'name':<14} {'train':>7} {'test':>7} {'shape':<12} {'state':<9} sources")
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "text"
        sources = ", ".join(row.sources) or "scikit-learn"
        say(f"{row.name:<14} {row.n_train:>7} {row.n_test:>7} {shape:<12} {row.state:<9} {sources}")


@data_app.command("show")
def data_show_command(name: DatasetName) -> None:
    """Print the card of a dataset: source, licence, clients, target, columns and known leaks.

    Example:
      noisewise data show fars
    """
    from noisewise.data import describe_dataset

    say(describe_dataset(name))


@data_app.command("get")
def data_get_command(
    name: DatasetName,
    folder: Annotated[
        Path | None, typer.Option(help="Folder with files that you placed there.")
    ] = None,
) -> None:
    """Download a dataset into the cache, from the first source that has it, and verify it.

    Example:
      noisewise data get mnist
    """
    from noisewise.data import get_dataset
    from noisewise.data.progress import progress_bar

    with progress_bar() as progress:
        status = get_dataset(name, folder, progress)
    say(f"{status.name}: {status.state}" + (f" in {status.folder}" if status.folder else ""))


@data_app.command("verify")
def data_verify_command(name: DatasetName) -> None:
    """Check the SHA-256 of a cached dataset; exit code 1 if it is missing or damaged."""
    from noisewise.data import verify_dataset

    problems = verify_dataset(name)
    for problem in problems:
        say(f"noisewise: {name}: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    say(f"{name}: ok")
