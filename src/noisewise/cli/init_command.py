"""`noisewise init`: write a config that runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import TRAIN, app, say, words
from noisewise.errors import InvalidValueError


@app.command("init", rich_help_panel=TRAIN)
def init_command(
    file: Annotated[Path, typer.Argument(help="The config to write.")] = Path("experiment.toml"),
    data: Annotated[
        str | None,
        typer.Option(help="A name from `noisewise data list`, or a folder of CSV files."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of clients.")
    ] = None,
    epsilon: Annotated[
        str | None, typer.Option(help="One for all clients, or one for each: 0.5,1,8.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Number of rounds.")] = 40,
    target: Annotated[
        str | None,
        typer.Option(help="For CSV files: the column with the class. Default: target."),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="For CSV files: all classes, comma-separated.")
    ] = None,
) -> None:
    """Write a config that runs, from a few answers or from options.

    In a terminal it asks for missing values; elsewhere it uses defaults: the digits dataset, 10
    clients, epsilon 1. An existing file is not replaced.

    Examples:
      noisewise init

      noisewise init my.toml --data mnist --clients 20 --epsilon 0.5

      noisewise init wards.toml --data wards/ --target ill --classes no,yes --epsilon 1,2,8
    """
    from noisewise.data.datasets import dataset_names
    from noisewise.experiments.config import load_config
    from noisewise.experiments.new_config import has_own_clients, new_config
    from noisewise.storage import write_atomic

    if file.exists():
        allowed = "exists already; name another file, or remove it first"
        raise InvalidValueError("FILE", str(file), allowed)
    asks = sys.stdin.isatty()
    if data is None:
        names = ", ".join(dataset_names())
        data = typer.prompt(f"Dataset ({names}, or a folder)", "digits") if asks else "digits"
    _reject_unused(data, {"--clients": clients, "--target": target, "--classes": classes})
    if clients is None and not has_own_clients(data):
        clients = typer.prompt("Number of clients", 10, type=int) if asks else 10
    if epsilon is None:
        epsilon = typer.prompt("Epsilon, one or several", "1") if asks else "1"
    text = new_config(
        data,
        clients=clients or 10,
        epsilons=_numbers("--epsilon", epsilon),
        rounds=rounds,
        target=target or "target",
        classes=words("--classes", classes),
    )
    write_atomic(file, text.encode())
    try:
        load_config(file)
    except InvalidValueError:
        file.unlink()
        raise
    say(f"wrote {file}\nnext: noisewise compare {file}")


def _reject_unused(data: str, options: Mapping[str, object]) -> None:
    """Reject options that the data do not use: they would seem to have an effect."""
    from noisewise.experiments.new_config import has_own_clients

    unused = {}
    if has_own_clients(data):
        unused["--clients"] = f"has no effect: {data} has its own clients; leave it out"
    if not Path(data).is_dir():
        allowed = "is for a folder of CSV files (--data FOLDER); leave it out"
        unused |= {"--target": allowed, "--classes": allowed}
    for option, allowed in unused.items():
        if options[option] is not None:
            raise InvalidValueError(option, options[option], allowed)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        allowed = "must be one or more numbers, separated by commas"
        raise InvalidValueError(option, text, allowed) from None
