"""Entries of a ledger in groups: by their cost, their federation and their software."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noisewise.privacy.ledger import Entry

__all__ = [
    "FederationUse",
    "Kind",
    "SoftwareUse",
    "federations",
    "kinds",
    "short_time",
    "software_uses",
]


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


@dataclass(frozen=True)
class FederationUse:
    """What one federation was charged: rounds, entries of any kind, first and last time.

    ``name`` is the site's name for it; empty for entries without a name.
    """

    name: str
    rounds: int
    entries: int
    first: str
    last: str

    @property
    def text(self) -> str:
        """One line about it."""
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds:,} rounds"
        return f"{self.name or 'without a name'}: {rounds}, {_period(self.first, self.last)}"


def federations(entries: Sequence[Entry]) -> tuple[FederationUse, ...]:
    """Group entries by federation, in the order of first appearance."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.federation, []).append(entry)
    return tuple(
        FederationUse(
            name,
            sum(entry.purpose == "training" for entry in group),
            len(group),
            group[0].reserved_at,
            group[-1].reserved_at,
        )
        for name, group in groups.items()
    )


@dataclass(frozen=True)
class SoftwareUse:
    """The entries that one version of the software made.

    Attributes:
        name: version and hash of the trusted core, or ``unknown``.
        entries: how many.
        first: time of the first.
        last: time of the last.
    """

    name: str
    entries: int
    first: str
    last: str

    @property
    def text(self) -> str:
        """One line about it."""
        count = "1 entry" if self.entries == 1 else f"{self.entries:,} entries"
        return f"{self.name}: {count}, {_period(self.first, self.last)}"


def software_uses(entries: Sequence[Entry]) -> tuple[SoftwareUse, ...]:
    """Group entries by the software that made them, in the order of first appearance."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        name = entry.software or "unknown (an older version)"
        groups.setdefault(name, []).append(entry.reserved_at)
    return tuple(
        SoftwareUse(name, len(group), group[0], group[-1]) for name, group in groups.items()
    )


def _period(first: str, last: str) -> str:
    return f"{first[:10]} to {last[:10]}"


def short_time(stamp: str | None) -> str:
    """Return a time of the ledger without fractions of a second; empty for None."""
    return "" if stamp is None else stamp[:19].replace("T", " ")
