"""What an artefact amounts to: grids beside the paper's, claims of its text, figures, data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from noisewise.experiments.paper.effort import Effort
from noisewise.report.grids import Grid, grid_verdict

__all__ = ["Claim", "Outcome", "grid_data", "verdicts"]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that can be checked.

    Attributes:
        text: the claim in our words.
        holds: whether our figures bear it out; None where they cannot tell.
        measured: what we found.
    """

    text: str
    holds: bool | None
    measured: str

    def sentence(self) -> str:
        """The claim with its verdict."""
        word = (
            "cannot be told" if self.holds is None else "holds" if self.holds else "DOES NOT HOLD"
        )
        return f"{word}: {self.text} ({self.measured})"


@dataclass(frozen=True)
class Outcome:
    """An artefact, computed.

    Attributes:
        grids: tables of figures.
        claims: of the paper's text.
        figures: by name.
        data: further figures for the JSON.
        notes: what a reader has to know.
        failures: runs that ended in an error.
        not_comparable: why the paper's figures are not comparable with ours; empty if they are.
        effort: of the training behind it; None where nothing is trained.
    """

    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    not_comparable: str = ""
    effort: Effort | None = None


def verdicts(outcome: Outcome) -> list[str]:
    """The verdict in words: one sentence for each grid and claim."""
    if outcome.not_comparable:
        return [f"No verdict: {outcome.not_comparable}."]
    compared = [g for g in outcome.grids if _judged(g)]
    return [grid_verdict(g) for g in compared] + [claim.sentence() for claim in outcome.claims]


def _judged(grid: Grid) -> bool:
    return any(grid.verdict(cell) for row in grid.rows.values() for cell in row.values())


def grid_data(grid: Grid) -> dict[str, Any]:
    """A grid for JSON."""
    return {
        "title": grid.title,
        "tolerance": grid.tolerance,
        "relative": grid.relative,
        "rows": {
            row: {
                column: {
                    "ours": cell.ours,
                    "spread": cell.spread,
                    "runs": cell.runs,
                    "paper": cell.paper,
                    "paper_spread": cell.paper_spread,
                    "difference": cell.difference,
                    "verdict": grid.verdict(cell),
                    "note": cell.note,
                }
                for column, cell in cells.items()
            }
            for row, cells in grid.rows.items()
        },
    }
