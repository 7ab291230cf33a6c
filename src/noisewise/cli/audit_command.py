"""`noisewise audit`: measure whether a client's replies reveal more than its ledger claims."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import (
    SITE,
    AsJson,
    Protected,
    app,
    say,
)


@app.command("audit", rich_help_panel=SITE)
def audit_command(
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Independent runs.")] = 4,
    canaries: Annotated[
        int, typer.Option(min=2, metavar="N", help="Known records (or persons) in each run.")
    ] = 1000,
    unit: Annotated[
        Protected, typer.Option(help="What the audited budget protects: a record or a person.")
    ] = Protected.RECORD,
    records_per_person: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --unit person: records of each person.")
    ] = 3,
    noise_multiplier: Annotated[float, typer.Option(help="z of the audited plan.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Delta of the claimed budget.")] = 1e-5,
    accountant: Annotated[str, typer.Option(help="One of pld, rdp, moments.")] = "pld",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure and audit.json.")
    ] = None,
    hostile: Annotated[
        bool,
        typer.Option(
            "--hostile", help="Search for parameters at which rounding breaks the clipping bound."
        ),
    ] = False,
    site: Annotated[
        Path | None, typer.Option(help="With --hostile: a site's file; its model is attacked.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="With --hostile and without --site: a model for 28 x 28 images.")
    ] = "mlp",
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="S", help="With --hostile: duration of each search in seconds."
        ),
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Put known records into a client's data and test whether its replies reveal them.

    The records pass through the code of a deployed client: ledger, local DP-SGD with the operating
    system's randomness, sealed reply. Exit code 1 if the replies disprove the claimed epsilon.

    With --hostile, the audit acts as a server that chooses the model's parameters. It searches for
    parameters at which one more record changes a sum of clipped gradients by more than the clipping
    norm. It uses synthetic records only. Exit code 1 if it finds such parameters.

    Examples:
      noisewise audit --output runs/audit
      noisewise audit --unit person --records-per-person 5
      noisewise audit --hostile --site site.toml
    """
    if hostile:
        _hostile(site, model, seconds, as_json)
        return
    from noisewise.federation.canary_audit import run_audit
    from noisewise.report.audit_report import audit_figure, audit_text
    from noisewise.report.chart import save_figure
    from noisewise.storage import to_json, write_atomic

    with _without_budget_warnings():
        result = run_audit(
            runs=runs,
            canaries=canaries,
            noise_multiplier=noise_multiplier,
            delta=delta,
            accountant=accountant,
            unit=unit.value,
            records_per_person=records_per_person,
        )
    say(to_json(result.summary()) if as_json else audit_text(result))
    if output is not None:
        write_atomic(output / "audit.json", (to_json(result.summary(), indent=1) + "\n").encode())
        png, *_ = save_figure(audit_figure(result), output, "audit")
        say(f"\nfigure: {png}", err=as_json)
    if result.violated:
        raise typer.Exit(1)


def _hostile(site_file: Path | None, model_name: str, seconds: float, as_json: bool) -> None:
    from dataclasses import asdict

    import torch
    from torch.nn.functional import cross_entropy

    from noisewise.federation.hostile_audit import hostile_search
    from noisewise.report.audit_report import hostile_text
    from noisewise.site.site_file import load_site
    from noisewise.storage import to_json
    from noisewise.training.engine import make_engine
    from noisewise.training.gradients import Loss
    from noisewise.training.models import make_model
    from noisewise.training.synthetic_records import RecordForm

    loss: Loss
    if site_file is not None:
        site = load_site(site_file)
        model, loss, form = site.model, site.loss, site.record_form
        name = site.config.model.name
    else:
        torch.set_num_threads(1)
        model, loss = make_model(model_name, (1, 28, 28), 10, seed=0), cross_entropy
        form, name = RecordForm.single((1, 28, 28), torch.float32, (), torch.int64), model_name
    deployed, simulated = (
        hostile_search(
            model, loss, form, engine=make_engine(model, loss, isolate=isolate), seconds=seconds
        )
        for isolate in (True, False)
    )
    if as_json:
        both = {"deployed": asdict(deployed), "simulator": asdict(simulated)}
        say(to_json({"model": name, **both, "violated": deployed.violated}))
    else:
        say(hostile_text(name, deployed, simulated))
    if deployed.violated:
        raise typer.Exit(1)


@contextlib.contextmanager
def _without_budget_warnings() -> Iterator[None]:
    """Silence the ledger: each run of an audit spends its whole budget on purpose."""
    logger = logging.getLogger("noisewise.privacy.ledger")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
