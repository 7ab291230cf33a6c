"""Tables of a real federation: what its server saw, and what its sites declare.

A server sees which nodes answered and what they sent. It cannot see how an update was made, so the
tables make no statement about privacy; they only repeat what a site declares, as its claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from noisewise.federation.missing_updates import causes_of
from noisewise.federation.results import RunResult
from noisewise.report.chart import Table

__all__ = ["NOT_CHECKED", "declaration_table", "seen_table", "server_views"]

NOT_CHECKED = "not checked: a server sees updates, not how they were made"
_CLAIM = "unsigned; this server did not check it"


def server_views(results: Sequence[RunResult]) -> list[tuple[str, Table]]:
    """Return pairs (heading, table) for each real run: what the server saw, what sites declare."""
    views = []
    for run in results:
        if run.deployed:
            name = f"{run.method}, seed {run.seed}"
            views.append((f"{name}: what the server saw", seen_table(run)))
            if (declared := declaration_table(run)) is not None:
                n, n_declared = len(run.clients), len(run.declarations)
                count = f"{n_declared} of {n} nodes" if n_declared < n else f"all {n} nodes"
                views.append((f"{name}: what sites declare ({count})", declared))
    return views


def seen_table(run: RunResult) -> Table:
    """Return what the server of a real federation saw."""
    asked_nodes = {client for record in run.rounds for client in (*record.weights, *record.dropped)}
    used = {client for record in run.rounds for client in record.used}
    n_used = sum(len(record.used) for record in run.rounds)
    n_dropped = sum(len(record.dropped) for record in run.rounds)
    planned = run.settings.get("rounds", "?")
    rows = [
        (
            "rounds",
            f"{len(run.rounds)} of {planned} completed; {run.rounds_changed} changed the model",
        ),
        ("nodes", f"{len(asked_nodes)} asked; {len(used)} sent at least one update that was used"),
        ("updates", f"{n_used} used, {n_dropped} not used"),
        *(("not used", cause.text()) for cause in causes_of(run.rounds)),
        ("noise floor", _floor(run)),
        ("estimated noise", _noise(run)),
        ("privacy of the updates", NOT_CHECKED),
    ]
    return Table(("quantity", "seen by the server"), tuple(rows))


def _floor(run: RunResult) -> str:
    floor = run.settings.get("noise_floor")
    if floor is None:
        return "none: this server also accepted updates without noise"
    return f"{floor:.4g}: the guard dropped updates with less noise energy"


def _noise(run: RunResult) -> str:
    last = next((record for record in reversed(run.rounds) if record.noise_estimate), None)
    values = [v for v in (last.noise_estimate or {}).values() if math.isfinite(v)] if last else []
    if last is None or not values:
        return "not estimated"
    spread = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else f"{values[0]:.3g}"
    return (
        f"noise energy {spread} per update (round {last.round}). The server estimates it from the "
        "updates; it does not prove privacy"
    )


def declaration_table(run: RunResult) -> Table | None:
    """Return what each site declares about its budget; None if no site declares anything."""
    rows = tuple(
        (
            client,
            f"unit {claim.unit}, epsilon {claim.epsilon:g}, delta {claim.delta:g} ({_CLAIM})",
        )
        for client, claim in sorted(run.declarations.items())
    )
    return Table(("site", "declaration"), rows) if rows else None
