"""`noisewise audit`: does a client's update tell more about a record than its ledger says?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import AsJson, app


@app.command("audit")
def audit_command(
    runs: Annotated[int, typer.Option(min=1, help="Independent runs.")] = 4,
    canaries: Annotated[int, typer.Option(min=2, help="Known records of a run.")] = 1000,
    noise_multiplier: Annotated[float, typer.Option(help="z of the audited plan.")] = 1.0,
    delta: Annotated[float, typer.Option(help="delta of the claim.")] = 1e-5,
    accountant: Annotated[str, typer.Option(help="One of pld, rdp, moments.")] = "pld",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure and audit.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hide known records in a client's data, and see whether its replies give them away.

    The records go through the code of a deployed client: ledger, local DP-SGD with the operating
    system's randomness, sealed reply. Exit code 1 if the guesses disprove the claimed epsilon.

    Example:
      noisewise audit --output runs/audit
    """
    from noisewise.federation.audit import run_audit
    from noisewise.federation.results import to_json
    from noisewise.report.audit import audit_figure, audit_text
    from noisewise.report.chart import save_figure
    from noisewise.storage import write_atomic

    with _without_budget_warnings():
        result = run_audit(
            runs=runs,
            canaries=canaries,
            noise_multiplier=noise_multiplier,
            delta=delta,
            accountant=accountant,
        )
    typer.echo(to_json(result.summary()) if as_json else audit_text(result))
    if output is not None:
        write_atomic(output / "audit.json", (to_json(result.summary(), indent=1) + "\n").encode())
        png, *_ = save_figure(audit_figure(result), output, "audit")
        typer.echo(f"\nfigure: {png}", err=as_json)
    if result.violated:
        raise typer.Exit(1)


@contextlib.contextmanager
def _without_budget_warnings() -> Iterator[None]:
    """Each run of an audit spends its ledger's whole budget on purpose."""
    logger = logging.getLogger("noisewise.privacy.ledger")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
