"""The model card of a run: what the model is, what its privacy covers, who disclosed what."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from noisewise import __version__
from noisewise.federation.results import RunResult
from noisewise.report.cell_text import markdown_table, markdown_text, printable_run
from noisewise.report.disclosures import disclosure
from noisewise.storage import write_atomic

__all__ = ["MODEL_CARD", "model_card", "write_model_card"]

MODEL_CARD = "model_card.md"
_LIBRARIES = ("torch", "numpy", "dp-accounting")


def model_card(
    result: RunResult, config: Mapping[str, Any] | None = None, *, day: date | None = None
) -> str:
    """Describe a run's model in Markdown.

    Args:
        result: of the run.
        config: content of its config, for task, data and model; None leaves them out.
        day: date of the card; by default today (UTC).

    Returns:
        Sections on task and data, privacy (epsilon and delta of every client, accountant, unit),
        disclosures, metrics, files and versions.

    Example:
        The card of a run that a folder holds:

            text = model_card(nw.load_result("runs/demo/runs/NoiseWise-seed0"))
            Path("MODEL_CARD.md").write_text(text)
    """
    result = printable_run(result)
    day = datetime.now(UTC).date() if day is None else day
    sections = (
        ("Task, data and model", _facts(_task_rows(config or {}))),
        ("Training", _facts(_training_rows(result))),
        ("Privacy", _privacy(result)),
        ("Disclosed to the server", _disclosed(result)),
        ("Metrics", _facts(_metric_rows(result))),
        ("Use", _use(result)),
        ("Versions", _facts([("date", day.isoformat()), *_versions()])),
    )
    body = "".join(f"\n## {title}\n\n{text}\n" for title, text in sections if text)
    return f"# Model card: {markdown_text(result.method)}, seed {result.seed}\n{body}"


def write_model_card(
    result: RunResult, folder: Path, config: Mapping[str, Any] | None = None
) -> Path:
    """Write ``model_card.md`` into the folder of a run; see `model_card` for the arguments.

    Returns:
        The file.
    """
    file = folder / MODEL_CARD
    write_atomic(file, model_card(result, config).encode())
    return file


def _facts(rows: Sequence[tuple[str, object]]) -> str:
    if not rows:
        return ""
    return markdown_table(("", "value"), [(name, str(value)) for name, value in rows])


def _task_rows(config: Mapping[str, Any]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for table in ("task", "data", "features", "model"):
        content = config.get(table)
        if isinstance(content, Mapping):
            rows += [
                (f"{table}: {name}", value)
                for name, value in content.items()
                if value not in (None, {}, [])
            ]
        elif content is not None:
            rows.append((table, content))
    training = config.get("training") or {}
    return rows + [
        (name, training[name])
        for name in ("task", "loss", "metric", "metrics")
        if training.get(name) is not None
    ]


def _training_rows(result: RunResult) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("method", result.method),
        ("seed", result.seed),
        ("status", result.status),
        ("rounds", f"{len(result.rounds)}, of which {result.rounds_changed} changed the model"),
        ("clients", len(result.clients)),
        *_size_rows(result),
    ]
    return rows + [(name, value) for name, value in result.settings.items() if value is not None]


def _size_rows(result: RunResult) -> list[tuple[str, object]]:
    """The number of training records or persons, and of the model's parameters, if known."""
    counts = [facts.get("n_examples") for facts in result.clients.values()]
    known = [count for count in counts if count is not None]
    rows: list[tuple[str, object]] = []
    if known and len(known) == len(counts):
        rows.append((f"training {result.unit}s", f"{sum(known):,}"))
    sizes = None if result.trained is None else result.trained.sizes()
    if sizes is not None:
        rows += [("parameters", f"{sizes[0]:,}"), ("trained parameters", f"{sizes[1]:,}")]
    return rows


def _privacy(result: RunResult) -> str:
    if result.deployed:
        return _claimed_privacy(result)
    if result.guarantee is None:
        return "Trained **without privacy**: the parameters may reveal training records."
    headings = (
        "client", "epsilon (budget)", "epsilon (spent)", "delta", "noise multiplier",
        "sampling rate", "steps in a round",
    )  # fmt: skip
    rows = [
        (client, f"{facts['epsilon']:g}", _spent(result, client), f"{facts['delta']:g}",
         f"{facts['noise_multiplier']:.4g}", f"{facts['sample_rate']:.4g}",
         str(facts["steps_per_round"]))
        for client, facts in result.clients.items()
    ]  # fmt: skip
    return (
        f"Each client's budget protects one {result.unit} (unit: {result.unit}): neighbouring "
        f"datasets differ by adding or removing {_neighbour(result)} of one client. "
        f"{_records_of_a_step(result)}Budgets are those of this simulation; "
        f"accountant: `{result.settings.get('accountant', 'unknown')}`. Choosing settings by "
        "looking at results of earlier runs on the same records is not covered.\n\n"
        + markdown_table(headings, rows)
    )


def _neighbour(result: RunResult) -> str:
    return "one record" if result.unit == "record" else "all records of one person"


def _records_of_a_step(result: RunResult) -> str:
    """How many records of a person a step uses; empty if budgets protect records."""
    limits = {f["max_records"] for f in result.clients.values() if "max_records" in f}
    if not limits:
        return ""
    return f"A step uses at most {max(limits)} records of a person, and their mean gradient. "


def _spent(result: RunResult, client: str) -> str:
    spent = result.epsilon_spent.get(client)
    if not result.rounds:
        return "0"
    return "no limit" if spent is None else f"{spent:.4g}"


def _claimed_privacy(result: RunResult) -> str:
    """What sites declare; a server cannot check it."""
    claims = result.declarations
    rows = [
        (client, claims[client].unit, f"{claims[client].epsilon:g}", f"{claims[client].delta:g}")
        if client in claims
        else (client, "not declared", "not declared", "not declared")
        for client in result.clients
    ]
    return (
        "The server of a real federation knows the sites' updates only. The table repeats what the "
        "sites declared; the server did not check it.\n\n"
        + markdown_table(("site", "unit", "epsilon", "delta"), rows)
    )


def _disclosed(result: RunResult) -> str:
    if not result.shares_model:
        return "Nothing: every client trained a model of its own."
    lines = ["- each client's noised update, in the rounds in which it took part"]
    for need in result.needs:
        texts = disclosure(need)
        lines.append(f"- {texts.entered if result.deployed else texts.reported}")
    return "\n".join(lines)


def _metric_rows(result: RunResult) -> list[tuple[str, object]]:
    main = result.metric.name
    values = {
        **result.metrics,
        f"{main}_spread": result.score_spread,
        f"worst_tenth_{main}": result.worst_tenth_score,
        "train_loss": result.train_loss,
        "noise_ratio": result.noise_ratio,
    }
    rows: list[tuple[str, object]] = [
        (name.replace("_", " "), f"{value:.4g}")
        for name, value in values.items()
        if math.isfinite(value)
    ]
    last = result.last_evaluated
    if last is not None:
        rows.append(("evaluated after round", last.round))
    records = "the server's public records" if result.deployed else "held-out records of clients"
    return [*rows, ("measured on", records)] if rows else []


def _use(result: RunResult) -> str:
    if result.trained is None:
        return "There is no common trained model in this folder."
    return (
        "`noisewise.load_model(folder, model)` fills a model of the same structure from "
        "`model.safetensors`; `model.load_state_dict` takes the same tensors"
        + (", with `strict=False` for frozen parameters and buffers." if result.deployed else ".")
    )


def _versions() -> list[tuple[str, str]]:
    rows = [("noisewise", __version__), ("Python", platform.python_version())]
    for name in _LIBRARIES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return rows
