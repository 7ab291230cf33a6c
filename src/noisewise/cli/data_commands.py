"""`noisewise data`: datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import (
    DATA,
    AsJson,
    app,
    say,
)
from noisewise.errors import InvalidValueError
from noisewise.text import align_columns

data_app = typer.Typer(help="List, download and verify datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data", rich_help_panel=DATA)

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
    table = [("name", "train", "test", "shape", "state", "sources")]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "text"
        sources = ", ".join(row.sources) or "scikit-learn"
        table.append((row.name, str(row.n_train), str(row.n_test), shape, row.state, sources))
    say("\n".join(align_columns(table, right=(1, 2))))


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
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names from `noisewise data list`.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder with files that you placed there, for a single dataset."),
    ] = None,
) -> None:
    """Download datasets into the cache, each from the first source that has it, and verify them.

    Examples:
      noisewise data get mnist

      noisewise data get mnist cifar10
    """
    from noisewise.checks import known_name
    from noisewise.data import dataset_names, get_dataset
    from noisewise.data.progress import progress_bar

    if folder is not None and len(names) > 1:
        raise InvalidValueError("--folder", str(folder), "is for one dataset; name only one")
    for name in [known_name("dataset", name, dataset_names()) for name in names]:
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
