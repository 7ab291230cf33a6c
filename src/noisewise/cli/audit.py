"""`noisewise audit`: does a client's update tell more about a record than its ledger says?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import AsJson, app, say


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
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Search for parameters at which rounding breaks clipping."),
    ] = False,
    site: Annotated[
        Path | None, typer.Option(help="With --hostile: a site's file, whose model is attacked.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="With --hostile and no site: a model for 28 x 28 images.")
    ] = "mlp",
    seconds: Annotated[
        float, typer.Option(min=0.1, help="With --hostile: how long each search takes.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Hide known records in a client's data, and see whether its replies give them away.

    The records go through the code of a deployed client: ledger, local DP-SGD with the operating
    system's randomness, sealed reply. Exit code 1 if the guesses disprove the claimed epsilon.

    With --hostile, the audit instead plays a server that chooses the model's parameters, and looks
    for ones at which one record more moves a sum of clipped gradients by more than the clipping
    norm. Only made-up records are used. Exit code 1 if it finds any.

    Examples:
      noisewise audit --output runs/audit
      noisewise audit --hostile --site site.toml
    """
    if hostile:
        _hostile(site, model, seconds, as_json)
        return
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

    from noisewise.federation.flower.site import load_site
    from noisewise.federation.hostile_audit import hostile_search
    from noisewise.federation.results import to_json
    from noisewise.report.audit import hostile_text
    from noisewise.training.engine import make_engine
    from noisewise.training.gradients import Loss
    from noisewise.training.models import make_model
    from noisewise.training.synthetic import RecordForm

    loss: Loss
    if site_file is not None:
        site = load_site(site_file)
        model, loss, form = site.model, site.loss, site.record_form
        name = site.config.model.name
    else:
        torch.set_num_threads(1)
        model, loss = make_model(model_name, (1, 28, 28), 10, seed=0), cross_entropy
        form, name = RecordForm((1, 28, 28), torch.float32, (), torch.int64), model_name
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
    """Each run of an audit spends its ledger's whole budget on purpose."""
    logger = logging.getLogger("noisewise.privacy.ledger")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
