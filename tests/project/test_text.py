"""Tables for a terminal: the aligner, and the exact output of every table that uses it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from command import Noisewise

from noisewise.data.populations import population_table
from noisewise.data.specs import ClientSpec
from noisewise.paper.grids import Cell, Grid, grid_text
from noisewise.privacy.ledger import Entry, Statement
from noisewise.privacy.ledger.statement import EntryState
from noisewise.report.ledger_statement import statement_text
from noisewise.report.population_report import ClientRow, population_text
from noisewise.report.tables import aligned
from noisewise.text import align_columns


def lines(text: str) -> list[str]:
    """Lines of a table that is written between bars, so that spaces at an end can be seen."""
    return [line.strip().strip("|") for line in text.strip().splitlines()]


def test_columns_are_two_spaces_apart_and_lines_end_without_spaces() -> None:
    rows = [("client", "N", "note"), ("Zoë 病院", "2400", ""), ("", "7", "late")]
    assert align_columns(rows, right={1}) == lines("""
        |client     N  note|
        |Zoë 病院  2400|
        |           7  late|
    """)
    assert align_columns(rows, rule=True)[1] == "------  ----  ----"
    assert align_columns([("a", "b")], rule=True) == ["a  b", "-  -"]
    assert align_columns([]) == []


@pytest.mark.parametrize("rows", [[("a", "b"), ("c",)], [("a",), ("b", "c")]])
def test_rows_of_different_lengths_are_refused(rows: list[tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="zip"):
        align_columns(rows)


def test_table_of_methods() -> None:
    rows = [("NoiseWise", "91.2 %", ""), ("ward\x1b[2J", "-", "budgets")]
    assert aligned(("method", "accuracy", "told"), rows).split("\n") == lines(r"""
        |method         accuracy  told|
        |-------------  --------  -------|
        |NoiseWise      91.2 %|
        |ward\u001b[2J  -         budgets|
    """)


def test_grid_beside_published_figures() -> None:
    cells = {
        "Dist1": Cell(91.25, 0.5, 3, 90.0, 0.25),
        "Dist2": Cell(math.nan, note="3 diverged"),
    }
    grid = Grid("accuracy", "accuracy [%]", ("Dist1", "Dist2"), {"NoiseWise": cells}, digits=1)
    assert grid_text(grid).split("\n") == lines("""
        |accuracy [%]|
        ||
        |                             Dist1           Dist2|
        |NoiseWise  ours         91.2 ± 0.5  - (3 diverged)|
        |           paper       90.0 ± 0.25               -|
        |           difference         +1.2               -|
    """)


def test_entries_of_a_statement() -> None:
    def entry(number: int, state: EntryState, rate: float, steps: int, instruction: str) -> Entry:
        time = "2026-01-02T03:04:05+00:00"
        rest = (None, None, None, False, "00")
        return Entry(number, "training", state, instruction, rate, 1.25, steps, time, *rest)

    entries = (entry(9, "sealed", 0.0133, 75, "ab" * 32), entry(10, "reserved", 0.5, 2, "cd"))
    statement = Statement(
        "ledger", "id", "ward", "record", 1.0, 1e-5, "pld", "2026-01-01", 0.5, 0.5, 3, entries,
        "ef", 3, "noisewise",
    )  # fmt: skip
    assert statement_text(statement).split("\n\n")[-1].split("\n") == lines("""
        |no  charged at (UTC)     federation  purpose   state       noise z  rate q  steps  instruction|
        | 9  2026-01-02 03:04:05  -           training  reply made     1.25  0.0133     75  abababababababab|
        |10  2026-01-02 03:04:05  -           training  no reply       1.25     0.5      2  cd|
    """)  # noqa: E501


def test_population_with_its_noise() -> None:
    rows = [
        ClientRow("client-00", 2400, 32, 0.5, 75, 1.23456, 0.000123456, 0.987),
        ClientRow("b", 50, 8, 10.0, 7, 0.5, 12345.678, 0.013),
    ]
    assert population_text(rows).split("\n\n")[0].split("\n") == lines("""
        |client        N   b  steps  epsilon      z    sigma^2  oracle weight|
        |client-00  2400  32     75      0.5  1.235  0.0001235        98.70 %|
        |b            50   8      7       10    0.5  1.235e+04         1.30 %|
    """)


def test_population() -> None:
    specs = [ClientSpec("client-00", 2400, 32, 0.5, 1e-4), ClientSpec("b", 50, 8, 10.0, 1e-5)]
    assert population_table(specs).split("\n") == lines("""
        |client        N   b       q  steps  epsilon   delta|
        |client-00  2400  32  0.0133     75      0.5  0.0001|
        |b            50   8  0.1600      7       10   1e-05|
    """)


def test_estimates(noisewise: Noisewise, tmp_path: Path) -> None:
    updates = np.array([[1.0, 2.0, 8.0], [2.0, -4.0, 0.5]])
    np.savez(tmp_path / "updates.npz", updates=updates)
    out = noisewise("estimate", tmp_path / "updates.npz", "--estimator", "norm").stdout
    assert out.splitlines() == lines("""
        |client  noise variance    weight|
        |     0               5    0.7531|
        |     1              20    0.1883|
        |     2           64.25    0.0586|
    """)
