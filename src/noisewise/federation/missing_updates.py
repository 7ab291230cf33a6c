"""Reasons for missing updates in a server's run, grouped, each with advice for the operator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from noisewise.aggregation.drop_reason import DropKind
from noisewise.federation.round_record import RoundRecord

__all__ = ["Cause", "causes_of", "no_updates_text"]

_ADVICE = {
    DropKind.REFUSED: (
        "the site refused. noisewise's client sends one code for every reason (budget or planned "
        "rounds spent, learning rate outside its limits, another model, ledger or records missing, "
        "...). Ask the site: the reason is in its own log, and `noisewise ledger why` shows it"
    ),
    DropKind.LOST: (
        "Flower lost the node: check that the site's SuperNode runs and reaches the SuperLink"
    ),
    DropKind.FAILED: "the site's app failed: its SuperNode's log has the error",
    DropKind.SILENT: (
        "no reply before the round closed: give a round more time (round_seconds; round-seconds in "
        "the app's config) or check the site's SuperNode"
    ),
    DropKind.TOO_FEW: (
        "too few usable updates in the round: lower min_clients (min-clients), or connect more "
        "sites"
    ),
    DropKind.OTHER_FORM: (
        "the site trains another model or sends another form of update: compare [model] and "
        "[training] normalise in its file with the app's config"
    ),
    DropKind.TOO_QUIET: (
        "the guard dropped the update: compare noise-floor with the plans that the federation "
        "permits"
    ),
}
_ROUND = re.compile(r"\bround '?\d+'?")
_NUMBER = re.compile(r"(?<!code )(?<![\d.])\d[\d.]*(e[+-]?\d+)?")
_LISTED = 8


@dataclass(frozen=True)
class Cause:
    """One reason for missing updates.

    Attributes:
        reason: as first recorded, without the number of the round. Reasons that differ only in
            numbers count as one.
        clients: number of different clients with this reason.
        updates: number of updates that are missing for this reason, over all rounds.
        advice: what the operator can do; empty if there is no advice.
    """

    reason: str
    clients: int
    updates: int
    advice: str = ""

    def text(self) -> str:
        """The cause in one line."""
        sites = f"{self.clients} site" + "s" * (self.clients != 1)
        count = f"{self.updates} update" + "s" * (self.updates != 1)
        return f"{sites} ({count}): {self.reason}" + (f": {self.advice}" if self.advice else "")


def causes_of(records: Sequence[RoundRecord]) -> tuple[Cause, ...]:
    """The reasons why updates were not used, the most frequent first."""
    clients: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for record in records:
        for client, recorded in record.dropped.items():
            reason = _ROUND.sub("the round", recorded)
            key = _NUMBER.sub("#", reason)
            reasons.setdefault(key, reason)
            kinds.setdefault(key, record.drop_kinds.get(client, ""))
            clients.setdefault(key, []).append(client)
    ranked = sorted(clients.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        Cause(reasons[key], len(set(ids)), len(ids), _advice(kinds[key])) for key, ids in ranked
    )


def _advice(kind: str) -> str:
    """Empty for a reason without a kind, as in older records."""
    return _ADVICE[DropKind(kind)] if kind in _ADVICE else ""


def no_updates_text(records: Sequence[RoundRecord]) -> str:
    """The error text for a run in which no round changed the model, with the causes."""
    rounds = f"{len(records)} round" + "s" * (len(records) != 1)
    causes = causes_of(records)
    listed = [f"- {cause.text()}" for cause in causes[:_LISTED]]
    if len(causes) > _LISTED:
        listed.append(f"- {len(causes) - _LISTED} more reasons: see rounds.jsonl")
    first = f"no round changed the model ({rounds} played): there is no trained model."
    return "\n".join([first, *listed])
