"""`noisewise plan`, `methods` and `population`: commands that train nothing."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import (
    TRAIN,
    AsJson,
    Config,
    Set,
    app,
    overrides,
    say,
    warn,
)
from noisewise.text import align_columns


@app.command("plan", rich_help_panel=TRAIN)
def plan_command(
    epsilon: Annotated[float, typer.Option(help="Epsilon of the client's budget.")],
    examples: Annotated[int, typer.Option(help="N, the client's number of training records.")],
    batch_size: Annotated[int, typer.Option(help="b, the expected batch size.")],
    rounds: Annotated[int, typer.Option(help="Number of rounds that share the budget.")],
    delta: Annotated[float, typer.Option(help="Delta of the budget.")] = 1e-4,
    local_epochs: Annotated[int, typer.Option(help="Passes over the data in a round.")] = 1,
    clip: Annotated[float, typer.Option(help="Clipping norm c.")] = 3.0,
    learning_rate: Annotated[float, typer.Option(help="Learning rate, for sigma^2 only.")] = 0.01,
    parameters: Annotated[int, typer.Option(help="Model size p, for sigma^2 only.")] = 28938,
    accountant: Annotated[str, typer.Option(help="One of pld, rdp, moments.")] = "pld",
    as_json: AsJson = False,
) -> None:
    """Compute how much noise a client needs for its budget.

    Example:
      noisewise plan --epsilon 0.5 --delta 1e-4 --examples 2400 --batch-size 32 --rounds 200
    """
    from noisewise.aggregation.noise_floor import plan_noise
    from noisewise.data.specs import ClientSpec
    from noisewise.privacy.budget import PrivacyBudget, budget_warnings
    from noisewise.privacy.plan import make_plan
    from noisewise.privacy.spending import epsilon_spent

    spec = ClientSpec("this-site", examples, batch_size, epsilon, delta, local_epochs)
    plan = make_plan(spec, rounds=rounds, clip_norm=clip, accountant=accountant)
    answer = {
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "steps_per_round": plan.steps_per_round,
        "epsilon": epsilon_spent(plan, rounds),
        "delta": delta,
        "rounds": rounds,
        "accountant": accountant,
        "update_noise_variance": plan_noise(plan, parameters, learning_rate),
    }
    warn(budget_warnings(PrivacyBudget(epsilon, delta), examples))
    if as_json:
        say(json.dumps(answer))
        return
    say(f"noise multiplier z   {plan.noise_multiplier:.6g}")
    say(f"sample rate q        {plan.sample_rate:.6g}")
    say(f"steps per round      {plan.steps_per_round}")
    say(
        f"epsilon reached      {answer['epsilon']:.6g} of {epsilon:g} at delta {delta:g} "
        f"after {rounds} rounds ({accountant})"
    )
    say(
        f"sigma^2 of an update {answer['update_noise_variance']:.6g} "
        f"(p = {parameters}, learning rate {learning_rate:g}, clip {clip:g})"
    )


@app.command("methods", rich_help_panel=TRAIN)
def methods_command(as_json: AsJson = False) -> None:
    """List the methods and what the server needs to know about the clients."""
    from noisewise.aggregation.method_facts import METHODS

    needs = {name: [need.value for need in facts.needs] for name, facts in METHODS.items()}
    if as_json:
        rows = [
            {"method": name, "needs": needs[name], "private": facts.private,
             "summary": facts.summary}
            for name, facts in METHODS.items()
        ]  # fmt: skip
        say(json.dumps(rows))
        return
    table = [("method", "disclosed to the server", "description")]
    for name, facts in METHODS.items():
        table.append((name, ", ".join(needs[name]) or "nothing", facts.summary))
    say("\n".join(_fitted(table)))


def _fitted(table: Sequence[Sequence[str]]) -> list[str]:
    """Align a table; in a terminal that is too narrow, its last column has several lines."""
    others = align_columns([row[:-1] for row in table])
    indent = max(map(len, others)) + 2
    room = shutil.get_terminal_size(fallback=(10_000, 24)).columns - indent
    lines = []
    for start, row in zip(others, table, strict=True):
        first, *rest = textwrap.wrap(row[-1], max(room, 20), break_on_hyphens=False) or [""]
        lines += [f"{start:<{indent}}{first}".rstrip(), *(" " * indent + line for line in rest)]
    return lines


@app.command("population", rich_help_panel=TRAIN)
def population_command(
    config: Config,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure.")
    ] = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Show a config's clients: budgets, batches, the noise they need and the oracle's weights.

    Example:
      noisewise population configs/demo.toml --output runs/demo
    """
    from noisewise.experiments.config import load_config
    from noisewise.experiments.prepare import describe_population
    from noisewise.report.population_report import population_figure, population_text, save_figure
    from noisewise.storage import to_json

    rows = describe_population(load_config(config, overrides(settings)))
    if as_json:
        say(to_json([vars(row) for row in rows]))
    else:
        say(population_text(rows))
    if output is not None:
        png, *_ = save_figure(population_figure(rows), output, "population")
        say(f"\nfigure: {png}", err=as_json)
