"""The outcome of an artefact: tables next to the paper's, checked claims, figures, data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from noisewise.paper.grids import Grid, grid_verdict
from noisewise.paper.training_time import TrainingTime

__all__ = ["Claim", "Outcome", "grid_data", "verdicts"]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper that can be checked.

    Attributes:
        text: the claim in our words.
        holds: whether our figures support the claim; None if they are inconclusive.
        measured: the figures behind the verdict.
    """

    text: str
    holds: bool | None
    measured: str

    def sentence(self) -> str:
        """Return the claim with its verdict."""
        words = {None: "inconclusive", True: "holds", False: "DOES NOT HOLD"}
        return f"{words[self.holds]}: {self.text} ({self.measured})"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an artefact.

    Attributes:
        grids: the tables.
        claims: the checked claims of the paper's text.
        figures: the pictures by name.
        data: further values for the JSON file.
        notes: sentences that a reader needs to know.
        failures: the error of each run that failed.
        not_comparable: why our figures cannot be compared with the paper's; empty if they can.
        training_time: the time of the training; None if nothing is trained.
    """

    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    not_comparable: str = ""
    training_time: TrainingTime | None = None


def verdicts(outcome: Outcome) -> list[str]:
    """Return one sentence for each grid and claim."""
    if outcome.not_comparable:
        return [f"No verdict: {outcome.not_comparable}."]
    compared = [g for g in outcome.grids if _judged(g)]
    return [grid_verdict(g) for g in compared] + [claim.sentence() for claim in outcome.claims]


def _judged(grid: Grid) -> bool:
    return any(grid.verdict(cell) for row in grid.rows.values() for cell in row.values())


def grid_data(grid: Grid) -> dict[str, Any]:
    """Return a grid as data for JSON."""
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
