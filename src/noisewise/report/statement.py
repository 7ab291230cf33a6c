"""A ledger's statement for people: lines in a terminal, CSV, JSON and a page to print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime

from noisewise.privacy.ledger import Entry, Statement
from noisewise.report.cells import csv_text
from noisewise.report.html import template_environment
from noisewise.text import align_columns, printable

__all__ = ["Kind", "kinds", "statement_csv", "statement_html", "statement_json", "statement_text"]

_ENTRIES_ON_PAGE = 12

_STATES = {"sealed": "reply made", "reserved": "no reply"}
"""The two states in words: charged with a reply that could leave, charged without one."""


@dataclass(frozen=True)
class Kind:
    """Entries that cost the same: their number, and their steps together."""

    purpose: str
    sample_rate: float
    noise_multiplier: float
    entries: int
    steps: int


def kinds(entries: Sequence[Entry]) -> tuple[Kind, ...]:
    """Entries by what they cost, in the order in which they first came up."""
    found: dict[tuple[str, float, float], list[int]] = {}
    for entry in entries:
        key = (entry.purpose, entry.sample_rate, entry.noise_multiplier)
        found.setdefault(key, []).append(entry.steps)
    return tuple(Kind(*key, len(steps), sum(steps)) for key, steps in found.items())


def _share(statement: Statement) -> str:
    """Spent share in percent, rounded up: 100 % must never look like less."""
    tenths = -int(-statement.share * 1000 // 1)
    return f"{tenths / 10:.1f} %"


def _left(statement: Statement) -> str:
    if statement.rounds_left is None:
        return "nothing was asked for yet"
    if statement.rounds_left == 0:
        return "no further round like the last one fits"
    rounds = (
        "1 more round" if statement.rounds_left == 1 else f"{statement.rounds_left:,} more rounds"
    )
    return f"room for {rounds} like the last one"


def _figures(statement: Statement) -> str:
    """How many of the replies are figures, where there are any."""
    sealed = [entry.purpose for entry in statement.entries if entry.state == "sealed"]
    if "metrics" not in [entry.purpose for entry in statement.entries]:
        return ""
    metrics = sealed.count("metrics")
    return f" ({len(sealed) - metrics} updates of the model, {metrics} noised accuracies)"


def _time(stamp: str | None) -> str:
    return "" if stamp is None else stamp[:19].replace("T", " ")


def statement_text(statement: Statement, last: int = 20) -> str:
    """The statement as lines of text, with the latest entries.

    Args:
        statement: of a ledger.
        last: how many entries to show.
    """
    unsealed = len(statement.entries) - statement.sealed
    lines = [
        f"dataset    {printable(statement.dataset_id)}",
        f"promised   epsilon {statement.epsilon:g} at delta {statement.delta:g}, for each single "
        "record",
        f"spent      epsilon {statement.spent:.6g} ({_share(statement)}), by accountant "
        f"'{statement.accountant}', computed from the entries",
        f"remaining  epsilon {statement.left:.6g}: {_left(statement)}",
        f"left site  at most {statement.sealed} noised replies{_figures(statement)}; {unsealed} "
        "further rounds were charged and gave no reply",
        f"history    {statement.events} events, unbroken; last hash {statement.head}",
    ]
    shown = statement.entries[-last:] if last else ()
    if shown:
        lines += ["", *_table(shown)]
    if len(shown) < len(statement.entries):
        lines.append(f"({len(statement.entries) - len(shown)} earlier entries not shown: --last)")
    return "\n".join(lines)


def _table(entries: Sequence[Entry]) -> list[str]:
    titles = ("no", "charged at (UTC)", "for", "state", "noise z", "rate q", "steps", "instruction")
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
    return align_columns([titles, *rows], right={0, 4, 5, 6})


def statement_csv(statement: Statement) -> str:
    """All entries, one line each, with their names in the first line."""
    names = [field.name for field in fields(Entry)]
    rows = ([getattr(entry, name) for name in names] for entry in statement.entries)
    return csv_text([names, *(["" if value is None else value for value in row] for row in rows)])


def statement_json(statement: Statement) -> str:
    """The whole statement with all entries."""
    return json.dumps({**asdict(statement), "share": statement.share}, indent=1) + "\n"


def statement_html(statement: Statement, printed: datetime | None = None) -> str:
    """One page without any outside resource, to print or to file.

    Args:
        statement: of a ledger.
        printed: the date on the page; now by default.
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
