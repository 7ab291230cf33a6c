"""The statement of a ledger as text for a terminal, CSV, JSON, and an HTML page to print."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from noisewise.privacy.attack_risk import (
    FALSE_POSITIVE_RATES,
    AttackRisk,
    risk_of_budget,
    risk_of_steps,
)
from noisewise.privacy.composition import Counts
from noisewise.privacy.ledger import Entry, Statement
from noisewise.report.cell_text import csv_text
from noisewise.report.html import template_environment
from noisewise.report.ledger_groups import federations, kinds, short_time, software_uses
from noisewise.text import align_columns, printable

__all__ = [
    "Risks",
    "Software",
    "epsilon_text",
    "ledger_risks",
    "percent_up",
    "risk_rows",
    "statement_csv",
    "statement_html",
    "statement_json",
    "statement_text",
]

_ENTRIES_ON_PAGE = 20

_STATES = {"sealed": "reply made", "reserved": "no reply"}
"""Text of the two states: charged with a reply that could be sent, charged without one."""


@dataclass(frozen=True)
class Software:
    """The software that wrote a statement: its version, and the hash of its trusted core."""

    version: str
    core_sha256: str
    core_files: int


@dataclass(frozen=True)
class Risks:
    """The attacker's rates after what is spent so far, and when the whole budget is spent.

    Attributes:
        spent: of all entries so far.
        whole: of the site's plan if it is known (``whole.source`` is ``steps``), otherwise the
            worst case of the budget's epsilon and delta.
    """

    spent: AttackRisk
    whole: AttackRisk


def ledger_risks(statement: Statement, planned: Counts | None = None) -> Risks:
    """Compute the attacker's rates for a statement.

    Args:
        statement: statement of a ledger.
        planned: the most steps by (sample_rate, noise_multiplier) that the site's file permits.
            None if the file is not known.
    """
    counts, delta = statement.counts, statement.delta
    spent = risk_of_steps(counts, statement.spent, delta)
    if planned is None:
        return Risks(spent, risk_of_budget(statement.epsilon, delta))
    kinds = {*counts, *planned}
    largest = {kind: max(counts.get(kind, 0), planned.get(kind, 0)) for kind in kinds}
    return Risks(spent, risk_of_steps(largest, statement.epsilon, delta))


def percent_up(share: float) -> str:
    """Return a share in percent, rounded up: to 0.01 below 1 percent, otherwise to 0.1.

    Example:
        >>> percent_up(0.00011), percent_up(0.1234567), percent_up(0.99999)
        ('0.02 %', '12.4 %', '100 %')
    """
    digits = 2 if share <= 0.01 else 1
    steps = math.ceil(share * 100 * 10**digits)
    return f"{steps / 10**digits:.{digits}f}".rstrip("0").rstrip(".") + " %"


def epsilon_text(epsilon: float, digits: int, *, up: bool) -> str:
    """Return an epsilon with some digits: rounded up if it is spent, down if it is left.

    Example:
        >>> epsilon_text(1.28671, 4, up=True), epsilon_text(0.71329, 4, up=False)
        ('1.287', '0.7132')
    """
    context = Context(prec=digits, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    return f"{float(context.create_decimal_from_float(epsilon)):.{digits}g}"


def risk_rows(risks: Risks) -> list[tuple[str, str, str, str]]:
    """Return a row for each false-positive rate: its text, a guess, spent so far, whole budget."""
    rows = [
        (f"{percent_up(rate)} (1 in {round(1 / rate):,})", percent_up(rate), *map(percent_up, both))
        for rate, *both in zip(
            FALSE_POSITIVE_RATES,
            risks.spent.true_positive_rates,
            risks.whole.true_positive_rates,
            strict=True,
        )
    ]
    return [(label, guess, spent, whole) for label, guess, spent, whole in rows]


def _share(statement: Statement) -> str:
    """Return the spent share in percent, rounded up, so 100 % is never shown as less."""
    tenths = -int(-statement.share * 1000 // 1)
    return f"{tenths / 10:.1f} %"


def _left(statement: Statement) -> str:
    if statement.rounds_left is None:
        return "no round was requested yet"
    if statement.rounds_left == 0:
        return "not enough for another round like the last one"
    rounds = (
        "1 more round" if statement.rounds_left == 1 else f"{statement.rounds_left:,} more rounds"
    )
    return f"room for {rounds} like the last one"


def _figures(statement: Statement) -> str:
    """Return how many replies are updates and noised scores, if there are any of the latter."""
    sealed = [entry.purpose for entry in statement.entries if entry.state == "sealed"]
    if "metrics" not in [entry.purpose for entry in statement.entries]:
        return ""
    metrics = sealed.count("metrics")
    updates = f"{len(sealed) - metrics} {'update' if len(sealed) - metrics == 1 else 'updates'}"
    scores = "noised score" if metrics == 1 else "noised scores"
    return f" ({updates} of the model, {metrics} {scores})"


def statement_text(statement: Statement, last: int = 20, risks: Risks | None = None) -> str:
    """Return the statement as lines of text, with the latest entries.

    Args:
        statement: statement of a ledger.
        last: how many entries to show.
        risks: of `ledger_risks`; None computes them without a plan.
    """
    unsealed = len(statement.entries) - statement.sealed
    charged = "further round was charged" if unsealed == 1 else "further rounds were charged"
    lines = [
        f"dataset    {printable(statement.dataset_id)}",
        f"promised   epsilon {statement.epsilon:g} at delta {statement.delta:g}, for each single "
        f"{statement.unit}",
        f"spent      epsilon {epsilon_text(statement.spent, 6, up=True)} ({_share(statement)}), "
        f"by accountant '{statement.accountant}', computed from the entries",
        f"remaining  epsilon {epsilon_text(statement.left, 6, up=False)}: {_left(statement)}",
        f"left site  at most {statement.sealed} noised replies{_figures(statement)}; {unsealed} "
        f"{charged} and gave no reply",
        *_listed("federation", [printable(use.text) for use in federations(statement.entries)]),
        *_listed("software", [use.text for use in software_uses(statement.entries)]),
        f"history    {statement.events} events, unbroken; last hash {statement.head}",
        "",
        *_risk_lines(risks or ledger_risks(statement), statement.unit),
    ]
    shown = statement.entries[-last:] if last else ()
    if shown:
        lines += ["", *_table(shown)]
    if len(shown) < len(statement.entries):
        lines.append(
            f"({len(statement.entries) - len(shown)} earlier entries not shown; use --last)"
        )
    return "\n".join(lines)


def _listed(label: str, texts: Sequence[str]) -> list[str]:
    """Lines with a label before the first."""
    return [f"{'' if number else label:<10} {text}" for number, text in enumerate(texts)]


def _risk_lines(risks: Risks, unit: str) -> list[str]:
    headings = ("false alarms", "guess", "spent so far", "whole budget")
    advantages = (percent_up(risks.spent.advantage), percent_up(risks.whole.advantage))
    rows = [headings, *risk_rows(risks), ("advantage", "0 %", *advantages)]
    whole = (
        "Whole budget: the rounds that the site's file permits, with all entries so far."
        if risks.whole.source == "steps"
        else "Whole budget: the worst case of epsilon and delta; --site SITE computes it from the "
        "site's plan."
    )
    return [
        f"risk       largest share of the {unit}s in the dataset that any attacker can name",
        *(f"           {line}" for line in align_columns(rows, right={1, 2, 3})),
        f"           {whole}",
    ]


def _table(entries: Sequence[Entry]) -> list[str]:
    headings = (
        "no",
        "charged at (UTC)",
        "federation",
        "purpose",
        "state",
        "noise z",
        "rate q",
        "steps",
        "instruction",
    )
    rows = [
        (
            str(entry.number),
            short_time(entry.reserved_at),
            entry.federation or "-",
            entry.purpose,
            _STATES[entry.state],
            f"{entry.noise_multiplier:.5g}",
            f"{entry.sample_rate:.5g}",
            str(entry.steps),
            entry.instruction[:16],
        )
        for entry in entries
    ]
    return align_columns([headings, *rows], right={0, 5, 6, 7})


def statement_csv(statement: Statement) -> str:
    """Return all entries as CSV, with the names of the fields in the first line."""
    names = [field.name for field in fields(Entry)]
    rows = ([getattr(entry, name) for name in names] for entry in statement.entries)
    return csv_text([names, *(["" if value is None else value for value in row] for row in rows)])


def statement_json(
    statement: Statement, risks: Risks | None = None, software: Software | None = None
) -> str:
    """Return the statement with all entries as JSON.

    Args:
        statement: statement of a ledger.
        risks: of `ledger_risks`, added as ``risk`` if given.
        software: added as ``written_by`` if given.
    """
    content: dict[str, Any] = {**asdict(statement), "share": statement.share}
    if risks is not None:
        content["risk"] = {"false_positive_rates": FALSE_POSITIVE_RATES, **asdict(risks)}
    if software is not None:
        content["written_by"] = asdict(software)
    return json.dumps(content, indent=1) + "\n"


def statement_html(
    statement: Statement,
    risks: Risks | None = None,
    software: Software | None = None,
    printed: datetime | None = None,
    *,
    signed: bool = False,
) -> str:
    """Return the statement as an HTML page to print or to file; it loads no other file.

    Args:
        statement: statement of a ledger.
        risks: None computes them without a plan.
        software: that writes the page; None leaves the section out.
        printed: the date on the page; None uses the current time.
        signed: whether the page comes with a signature's file.
    """
    environment = template_environment()
    environment.filters["time"] = short_time
    risks = risks or ledger_risks(statement)
    level = "spent" if statement.rounds_left == 0 else "high" if statement.share >= 0.8 else "fine"
    training = [entry for entry in statement.entries if entry.purpose == "training"]
    return environment.get_template("ledger_statement.html").render(
        s=statement,
        share=_share(statement),
        factor=math.exp(min(700.0, statement.epsilon)),
        bar=min(100.0, 100 * statement.share),
        left=_left(statement),
        spent_epsilon=epsilon_text(statement.spent, 4, up=True),
        left_epsilon=epsilon_text(statement.left, 4, up=False),
        figures=_figures(statement),
        level=level,
        risks=risks,
        risk_rows=risk_rows(risks),
        named=[
            math.ceil(1000 * risk.true_positive_rates[1]) for risk in (risks.spent, risks.whole)
        ],
        one_in=round(1 / statement.delta),
        advantages=(percent_up(risks.spent.advantage), percent_up(risks.whole.advantage)),
        rounds=len(training),
        federations=federations(statement.entries),
        software=software,
        software_uses=software_uses(statement.entries),
        signed=signed,
        kinds=kinds(statement.entries),
        entries=statement.entries[-_ENTRIES_ON_PAGE:],
        states=_STATES,
        printed=short_time((printed or datetime.now(UTC)).astimezone(UTC).isoformat()),
    )
