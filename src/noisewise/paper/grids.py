"""Tables of our figures next to the published ones, as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from noisewise.report.cell_text import csv_text, latex_text, markdown_table, markdown_text
from noisewise.text import align_columns, printable

__all__ = ["Cell", "Grid", "grid_csv", "grid_latex", "grid_markdown", "grid_text", "grid_verdict"]


@dataclass(frozen=True)
class Cell:
    """One entry of a table: our figure and the published one.

    Attributes:
        ours: mean over runs; NaN if there is none.
        spread: standard deviation over runs; NaN for a single run.
        runs: number of runs.
        paper: the published figure; NaN if there is none.
        paper_spread: the published deviation; NaN if there is none.
        note: a remark, such as how many runs diverged.
        judged: False if our figure has another setting than the paper's; it gets no verdict.
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
        """Our figure minus the published one; NaN if either is missing."""
        return self.ours - self.paper


@dataclass(frozen=True)
class Grid:
    """A table of the paper, recomputed.

    Attributes:
        name: a short name, for files.
        title: what the figures are, with their unit.
        columns: the names of the columns, in order.
        rows: cells by row and column; a row may have no cell in some columns.
        digits: number of decimals to show; None shows four significant digits.
        tolerance: the largest difference that counts as agreement.
        relative: whether ``tolerance`` is a share of the published figure.
        comparable: False if the settings differ from the paper's; there are no verdicts then.
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
        """Return a figure as text."""
        if not math.isfinite(value):
            return "-"
        return f"{value:.4g}" if self.digits is None else f"{value:.{self.digits}f}"

    def distance(self, cell: Cell) -> float:
        """Return |difference| in units of the tolerance; NaN without a published figure.

        Published figures are rounded, so half a unit of their last digit does not count.
        """
        rounding = 0.5 * 10.0**-self.digits if self.digits else 0.0
        return self._distance(cell, rounding)

    def strict_distance(self, cell: Cell) -> float:
        """Return the same without an allowance for the rounding of the published figure."""
        return self._distance(cell, 0.0)

    def _distance(self, cell: Cell, rounding: float) -> float:
        if not self.comparable or not cell.judged or not math.isfinite(cell.difference):
            return math.nan
        difference = max(0.0, abs(cell.difference) - rounding)
        return difference / (self.tolerance * (abs(cell.paper) if self.relative else 1.0))

    def verdict(self, cell: Cell) -> str:
        """Return ``agrees``, ``close`` (within twice the tolerance), ``differs`` or ``""``."""
        distance = self.distance(cell)
        if math.isnan(distance):
            return ""
        return "agrees" if distance <= 1 else "close" if distance <= 2 else "differs"


def grid_verdict(grid: Grid) -> str:
    """Return a sentence with the number of figures that agree and the largest difference.

    It also gives the number of figures that agree only because published figures are rounded.
    """
    compared = [
        (grid.distance(cell), row, column, cell)
        for row, cells in grid.rows.items()
        for column, cell in cells.items()
        if grid.verdict(cell)
    ]
    if not compared:
        return f"{grid.title}: the paper prints no figures to compare with."
    within = sum(distance <= 1 for distance, *_ in compared)
    rounded = within - sum(grid.strict_distance(cell) <= 1 for *_, cell in compared)
    only = f", {rounded} of these only with the rounding of the printed figure" if rounded else ""
    share = within / len(compared)
    word = "agrees" if share >= 0.9 else "agrees in part" if share >= 0.5 else "does not agree"
    unit = (
        f"within {100 * grid.tolerance:g} % of"
        if grid.relative
        else f"within {grid.tolerance:g} of"
    )
    unit = unit if grid.tolerance > 1e-6 else "equal to"
    _, row, column, cell = max(compared, key=lambda item: item[0])
    return (
        f"{grid.title}: {word}; {within} of {len(compared)} figures {unit} the paper's{only}; "
        f"furthest is {row}, {column}: {grid.show(cell.ours)} against {grid.show(cell.paper)}."
    )


def _lines(grid: Grid) -> list[tuple[str, str, list[str]]]:
    """Return (row, kind, texts) of our figures, the paper's and the differences.

    Rows without published figures have no lines for the paper's figures and the differences.
    """
    lines = []
    for row, cells in grid.rows.items():
        in_order = [cells.get(column, Cell(math.nan)) for column in grid.columns]
        lines.append((row, "ours", [_ours(grid, cell) for cell in in_order]))
        if any(math.isfinite(cell.paper) for cell in in_order):
            published = [
                grid.show(c.paper)
                + (f" ± {c.paper_spread:.2g}" if math.isfinite(c.paper_spread) else "")
                for c in in_order
            ]
            lines.append(("", "paper", published))
            lines.append(("", "difference", [_difference(grid, cell) for cell in in_order]))
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
    """Return the grid as text with aligned columns, for a terminal."""
    lines = [["", "", *grid.columns], *([row, kind, *cells] for row, kind, cells in _lines(grid))]
    table = [[printable(cell) for cell in line] for line in lines]
    right = range(2, len(grid.columns) + 2)
    return "\n".join([printable(grid.title), "", *align_columns(table, right)])


def grid_markdown(grid: Grid) -> str:
    """Return the grid as a Markdown table with its title above."""
    rows = [[row, kind, *cells] for row, kind, cells in _lines(grid)]
    table = markdown_table(["method", "", *grid.columns], rows)
    return f"**{markdown_text(grid.title)}**\n\n{table}"


def grid_csv(grids: Sequence[Grid]) -> str:
    """Return the grids as CSV: one line for each figure, with all digits."""
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
    """Return the grid as a LaTeX table (booktabs), with the published figures in italics."""
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{latex_text(grid.title)}. Published figures are in italics.}}",
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
