"""`noisewise flower`: a ready Flower app, a check of a site's own file, how a run ended."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import app

flower_app = typer.Typer(
    help="Real federations with Flower: write an app, check a site, see how a run ended.",
    no_args_is_help=True,
)
app.add_typer(flower_app, name="flower")


@flower_app.command("new")
def flower_new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a ready Flower app: server, client, a site's file, keys, README.

    Example:
      noisewise flower new my-federation
    """
    from noisewise.federation.flower.app import write_app

    for path in write_app(folder):
        typer.echo(f"{path}")
    typer.echo(f"Read {folder / 'README.md'} next.")


@flower_app.command("check")
def flower_check_command(
    site: Annotated[Path, typer.Argument(help="A site's own file, site.toml.")],
) -> None:
    """Check a site's file, records and ledger, and say what a round costs. Nothing is charged.

    Example:
      noisewise flower check site.toml
    """
    from noisewise.federation.flower.check import check_site
    from noisewise.federation.flower.site import load_site

    typer.echo(f"{site}\n{check_site(load_site(site))}")


@flower_app.command("status")
def flower_status_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's folder of a run.")],
) -> None:
    """Say how a server's run ended and what the server saw. Exit code 0 only for a finished run.

    `flwr run --stream` ends with 0 also where the run failed; this command does not.

    Example:
      noisewise flower status runs/first
    """
    from noisewise.federation.results import load_run
    from noisewise.report.page import STATUS_WORDS
    from noisewise.report.server_view import server_views

    result = load_run(run)
    typer.echo(f"status: {STATUS_WORDS[result.status]}")
    for words, table in server_views([result]):
        typer.echo(f"\n{words}")
        for name, value in table.rows:
            typer.echo(textwrap.fill(f"{name}: {value}", 100, subsequent_indent="    "))
    if result.status != "finished":
        raise typer.Exit(1)
