"""Our figures beside published ones: a grid of cells as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from noisewise.report.cells import csv_text, latex_text, markdown_table, markdown_text
from noisewise.text import align_columns, printable

__all__ = ["Cell", "Grid", "grid_csv", "grid_latex", "grid_markdown", "grid_text", "grid_verdict"]


@dataclass(frozen=True)
class Cell:
    """One figure of ours and the published one.

    Attributes:
        ours: mean over runs; NaN where there is none.
        spread: standard deviation over runs; NaN for a single one.
        runs: how many.
        paper: the published figure; NaN where there is none.
        paper_spread: the published deviation; NaN where there is none.
        note: a remark, such as how many runs diverged.
        judged: False where ours was made otherwise than the paper's: then there is no verdict.
    """

    ours: float
    spread: float = math.nan
    runs: int = 1
    paper: float = math.nan
    paper_spread: float = math.nan
    note: str = ""
    judged: bool = True

    @property
    def difference(self) -> float:
        """Ours minus theirs; NaN without both."""
        return self.ours - self.paper


@dataclass(frozen=True)
class Grid:
    """A table of the paper, recomputed.

    Attributes:
        name: short, for files.
        title: what the figures are, with their unit.
        columns: in order.
        rows: cells by row and column; a row may lack columns.
        digits: decimals to show; None for four significant ones.
        tolerance: largest difference that counts as agreement.
        relative: whether ``tolerance`` is a share of the published figure.
        comparable: False where settings differ from the paper's: then there are no verdicts.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Cell]]
    digits: int | None = 2
    tolerance: float = 2.0
    relative: bool = False
    comparable: bool = True

    def show(self, value: float) -> str:
        """A figure as words."""
        if not math.isfinite(value):
            return "-"
        return f"{value:.4g}" if self.digits is None else f"{value:.{self.digits}f}"

    def distance(self, cell: Cell) -> float:
        """|difference| in units of the tolerance; NaN without a published figure.

        Published figures are rounded: half a unit of their last digit is no difference.
        """
        rounding = 0.5 * 10.0**-self.digits if self.digits else 0.0
        return self._distance(cell, rounding)

    def strict_distance(self, cell: Cell) -> float:
        """The same with the published figure taken as exact."""
        return self._distance(cell, 0.0)

    def _distance(self, cell: Cell, rounding: float) -> float:
        if not self.comparable or not cell.judged or not math.isfinite(cell.difference):
            return math.nan
        apart = max(0.0, abs(cell.difference) - rounding)
        return apart / (self.tolerance * (abs(cell.paper) if self.relative else 1.0))

    def verdict(self, cell: Cell) -> str:
        """``agrees``, ``close`` (within twice the tolerance), ``differs`` or ``""``."""
        distance = self.distance(cell)
        if math.isnan(distance):
            return ""
        return "agrees" if distance <= 1 else "close" if distance <= 2 else "differs"


def grid_verdict(grid: Grid) -> str:
    """One sentence: how many figures agree, and the largest difference.

    It says how many agree only because published figures are rounded.
    """
    found = [
        (grid.distance(cell), row, column, cell)
        for row, cells in grid.rows.items()
        for column, cell in cells.items()
        if grid.verdict(cell)
    ]
    if not found:
        return f"{grid.title}: the paper prints no figures to compare with."
    within = sum(distance <= 1 for distance, *_ in found)
    rounded = within - sum(grid.strict_distance(cell) <= 1 for *_, cell in found)
    thanks = f", {rounded} of these only with the rounding of the printed figure" if rounded else ""
    share = within / len(found)
    word = "agrees" if share >= 0.9 else "agrees in part" if share >= 0.5 else "does not agree"
    unit = (
        f"within {100 * grid.tolerance:g} % of"
        if grid.relative
        else f"within {grid.tolerance:g} of"
    )
    unit = unit if grid.tolerance > 1e-6 else "equal to"
    _, row, column, cell = max(found, key=lambda item: item[0])
    return (
        f"{grid.title}: {word}; {within} of {len(found)} figures {unit} the paper's{thanks}; "
        f"furthest is {row}, {column}: {grid.show(cell.ours)} against {grid.show(cell.paper)}."
    )


def _lines(grid: Grid) -> list[tuple[str, str, list[str]]]:
    """(row, kind, cells) of ours, theirs and the difference; what is empty is left out."""
    lines = []
    for row, cells in grid.rows.items():
        picked = [cells.get(column, Cell(math.nan)) for column in grid.columns]
        lines.append((row, "ours", [_ours(grid, cell) for cell in picked]))
        if any(math.isfinite(cell.paper) for cell in picked):
            theirs = [
                grid.show(c.paper)
                + (f" ± {c.paper_spread:.2g}" if math.isfinite(c.paper_spread) else "")
                for c in picked
            ]
            lines.append(("", "paper", theirs))
            lines.append(("", "difference", [_difference(grid, cell) for cell in picked]))
    return lines


def _ours(grid: Grid, cell: Cell) -> str:
    text = grid.show(cell.ours)
    if math.isfinite(cell.spread):
        text += f" ± {cell.spread:.2g}"
    return f"{text} ({cell.note})" if cell.note else text


def _difference(grid: Grid, cell: Cell) -> str:
    if not math.isfinite(cell.difference):
        return "-"
    if grid.relative and cell.paper:
        return f"{100 * cell.difference / cell.paper:+.1f} %"
    return f"{cell.difference:+.{grid.digits}f}" if grid.digits else f"{cell.difference:+.3g}"


def grid_text(grid: Grid) -> str:
    """Aligned columns for a terminal."""
    lines = [["", "", *grid.columns], *([row, kind, *cells] for row, kind, cells in _lines(grid))]
    table = [[printable(cell) for cell in line] for line in lines]
    right = range(2, len(grid.columns) + 2)
    return "\n".join([printable(grid.title), "", *align_columns(table, right)])


def grid_markdown(grid: Grid) -> str:
    """A Markdown table with its title above."""
    rows = [[row, kind, *cells] for row, kind, cells in _lines(grid)]
    table = markdown_table(["method", "", *grid.columns], rows)
    return f"**{markdown_text(grid.title)}**\n\n{table}"


def grid_csv(grids: Sequence[Grid]) -> str:
    """One line for each figure, with all digits."""
    headings = (
        "table",
        "row",
        "column",
        "ours",
        "spread",
        "runs",
        "paper",
        "difference",
        "verdict",
    )
    lines: list[Sequence[str]] = [headings]
    for grid in grids:
        for row, cells in grid.rows.items():
            for column, cell in cells.items():
                numbers = [cell.ours, cell.spread, cell.runs, cell.paper, cell.difference]
                texts = ["" if math.isnan(n) else repr(n) for n in numbers]
                lines.append([grid.name, row, column, *texts, grid.verdict(cell)])
    return csv_text(lines)


def grid_latex(grid: Grid) -> str:
    """A booktabs table: ours in upright, the paper's in italic figures."""
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{latex_text(grid.title)}. Ours, and in italics the published figures.}}",
        rf"\begin{{tabular}}{{l{'r' * len(grid.columns)}}}",
        r"\toprule",
        " & ".join(["", *map(latex_text, grid.columns)]) + r" \\",
        r"\midrule",
    ]
    for row, kind, cells in _lines(grid):
        if kind == "ours":
            lines.append(" & ".join([latex_text(row), *map(latex_text, cells)]) + r" \\")
        elif kind == "paper":
            lines.append(
                " & ".join(["", *(rf"\textit{{{latex_text(c)}}}" for c in cells)]) + r" \\"
            )
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])
