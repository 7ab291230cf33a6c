"""The statement of a ledger as text for a terminal, CSV, JSON, and an HTML page to print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime

from noisewise.privacy.ledger import Entry, Statement
from noisewise.report.cell_text import csv_text
from noisewise.report.html import template_environment
from noisewise.text import align_columns, printable

__all__ = ["Kind", "kinds", "statement_csv", "statement_html", "statement_json", "statement_text"]

_ENTRIES_ON_PAGE = 12

_STATES = {"sealed": "reply made", "reserved": "no reply"}
"""Text of the two states: charged with a reply that could be sent, charged without one."""


@dataclass(frozen=True)
class Kind:
    """Entries with the same purpose, sampling rate and noise: their number and total steps."""

    purpose: str
    sample_rate: float
    noise_multiplier: float
    entries: int
    steps: int


def kinds(entries: Sequence[Entry]) -> tuple[Kind, ...]:
    """Group entries by purpose, sampling rate and noise, in the order of first appearance."""
    steps_by_kind: dict[tuple[str, float, float], list[int]] = {}
    for entry in entries:
        key = (entry.purpose, entry.sample_rate, entry.noise_multiplier)
        steps_by_kind.setdefault(key, []).append(entry.steps)
    return tuple(Kind(*key, len(steps), sum(steps)) for key, steps in steps_by_kind.items())


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
    """Return how many replies are updates and noised accuracies, if there are any of the latter."""
    sealed = [entry.purpose for entry in statement.entries if entry.state == "sealed"]
    if "metrics" not in [entry.purpose for entry in statement.entries]:
        return ""
    metrics = sealed.count("metrics")
    return f" ({len(sealed) - metrics} updates of the model, {metrics} noised accuracies)"


def _time(stamp: str | None) -> str:
    return "" if stamp is None else stamp[:19].replace("T", " ")


def statement_text(statement: Statement, last: int = 20) -> str:
    """Return the statement as lines of text, with the latest entries.

    Args:
        statement: statement of a ledger.
        last: how many entries to show.
    """
    unsealed = len(statement.entries) - statement.sealed
    charged = "further round was charged" if unsealed == 1 else "further rounds were charged"
    lines = [
        f"dataset    {printable(statement.dataset_id)}",
        f"promised   epsilon {statement.epsilon:g} at delta {statement.delta:g}, for each single "
        "record",
        f"spent      epsilon {statement.spent:.6g} ({_share(statement)}), by accountant "
        f"'{statement.accountant}', computed from the entries",
        f"remaining  epsilon {statement.left:.6g}: {_left(statement)}",
        f"left site  at most {statement.sealed} noised replies{_figures(statement)}; {unsealed} "
        f"{charged} and gave no reply",
        f"history    {statement.events} events, unbroken; last hash {statement.head}",
    ]
    shown = statement.entries[-last:] if last else ()
    if shown:
        lines += ["", *_table(shown)]
    if len(shown) < len(statement.entries):
        lines.append(
            f"({len(statement.entries) - len(shown)} earlier entries not shown; use --last)"
        )
    return "\n".join(lines)


def _table(entries: Sequence[Entry]) -> list[str]:
    headings = (
        "no",
        "charged at (UTC)",
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
            _time(entry.reserved_at),
            entry.purpose,
            _STATES[entry.state],
            f"{entry.noise_multiplier:.5g}",
            f"{entry.sample_rate:.5g}",
            str(entry.steps),
            entry.instruction[:16],
        )
        for entry in entries
    ]
    return align_columns([headings, *rows], right={0, 4, 5, 6})


def statement_csv(statement: Statement) -> str:
    """Return all entries as CSV, with the names of the fields in the first line."""
    names = [field.name for field in fields(Entry)]
    rows = ([getattr(entry, name) for name in names] for entry in statement.entries)
    return csv_text([names, *(["" if value is None else value for value in row] for row in rows)])


def statement_json(statement: Statement) -> str:
    """Return the statement with all entries as JSON."""
    return json.dumps({**asdict(statement), "share": statement.share}, indent=1) + "\n"


def statement_html(statement: Statement, printed: datetime | None = None) -> str:
    """Return the statement as an HTML page to print or to file; it loads no other file.

    Args:
        statement: statement of a ledger.
        printed: the date on the page; None uses the current time.
    """
    environment = template_environment()
    environment.filters["time"] = _time
    level = "spent" if statement.rounds_left == 0 else "high" if statement.share >= 0.8 else "fine"
    return environment.get_template("ledger_statement.html").render(
        s=statement,
        share=_share(statement),
        bar=min(100.0, 100 * statement.share),
        left=_left(statement),
        figures=_figures(statement),
        level=level,
        kinds=kinds(statement.entries),
        entries=statement.entries[-_ENTRIES_ON_PAGE:],
        states=_STATES,
        printed=_time((printed or datetime.now(UTC)).astimezone(UTC).isoformat()),
    )
