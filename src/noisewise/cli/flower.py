"""`noisewise flower`: a ready Flower app, and a check of a site's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import app

flower_app = typer.Typer(
    help="Real federations with Flower: write an app, check a site.", no_args_is_help=True
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
    from noisewise.federation.flower.site import load_site
    from noisewise.privacy.ledger import Ledger

    found = load_site(site)
    records, plan = len(found.data()), found.plan
    with Ledger.open(
        found.ledger_file,
        dataset_id=found.config.ledger.dataset,
        budget=found.budget,
        accountant=found.config.budget.accountant,
    ) as ledger:
        spent = ledger.statement().spent
    typer.echo(
        f"{site}: sound. {records} records, {found.config.data.records} planned.\n"
        f"A round: {plan.steps_per_round} steps at q = {plan.sample_rate:.4g}, "
        f"z = {plan.noise_multiplier:.4g}, clipping norm {plan.clip_norm:g}; the budget is planned "
        f"for {plan.rounds} rounds.\n"
        f"Promised epsilon {found.budget.epsilon:g} at delta {found.budget.delta:g}; "
        f"spent {spent:.4g}."
    )
