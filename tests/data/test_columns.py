"""Declared columns: every record is coded by itself, and nothing is taken from the records."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noisewise.data import clients_from_files, dataset_from_csv, parse_columns, split_dataset
from noisewise.data.columns import MISSING_CELLS
from noisewise.data.csv_records import read_csv
from noisewise.data.federation_tables import Roles, code_rows
from noisewise.errors import InvalidValueError

DECLARATION = """
[columns.age]
type = "number"
range = [0, 100]
missing = 50
missing_codes = [999, "n/a"]

[columns.sex]
type = "category"
categories = ["male", "female"]
missing = "own"

[columns.stage]
type = "category"
categories = [1, 2, 3]
missing = 2

[columns.pressure]
type = "number"
range = [-1, 1]
missing = "own"

[columns.name]
type = "drop"
"""
COLUMNS = tomllib.loads(DECLARATION)["columns"]
CODER = parse_columns(COLUMNS)
HEADER = "pressure,name,target,age,stage,sex"
LINES = [
    "0.5,Ada,0,75,1,female",
    "?,Bob,1,,,",
    "-1,Cy,1,999,3.0,male",
    "1,Di,0,-3,2,divers",
    '0,"E, F",0,1e2,2e0,female',
]
CODED = [
    [0.5, 0, 1, 0, 1, 0, 0, 0.5, 0],
    [0, 0, 0, 1, 0, 1, 0, 0, 1],
    [0, 1, 0, 0, 0, 0, 1, -1, 0],
    [-1, 0, 0, 1, 0, 1, 0, 1, 0],
    [1, 0, 1, 0, 0, 1, 0, 0, 0],
]


def table(folder: Path, lines: list[str | bytes], name: str = "site.csv") -> Path:
    path = folder / name
    content = [line if isinstance(line, bytes) else line.encode() for line in [HEADER, *lines]]
    path.write_bytes(b"\n".join(content) + b"\n")
    return path


def test_columns_become_inputs_in_the_order_of_the_declaration(tmp_path: Path) -> None:
    assert CODER.names == (
        "age", "sex=male", "sex=female", "sex=missing", "stage=1", "stage=2", "stage=3",
        "pressure", "pressure=missing",
    )  # fmt: skip
    assert CODER.width == 9
    arrays = read_csv(table(tmp_path, LINES), columns=CODER)
    assert arrays["inputs"].dtype == np.float32
    np.testing.assert_array_equal(arrays["inputs"], np.array(CODED, dtype=np.float32))
    assert arrays["targets"].tolist() == [0, 1, 1, 0, 0]


def test_encode_takes_a_mapping() -> None:
    cells = {
        "age": "75",
        "sex": " female\t",
        "stage": "1",
        "pressure": ".5",
        "name": "x",
        "id": "7",
    }
    assert CODER.encode(cells).tolist() == CODED[0]
    assert CODER.encode(cells).dtype == np.float32
    with pytest.raises(InvalidValueError, match="must have the column stage"):
        CODER.encode({"age": "1", "sex": "male", "pressure": "0"})


def test_numbers_are_clipped_and_scaled() -> None:
    coder = parse_columns({"x": {"type": "number", "range": [-2, 6]}})
    values = [coder.encode({"x": cell})[0] for cell in ("-2", "-9e300", "0", "2", "6", "7")]
    assert values == [-1, -1, -0.5, 0, 1, 1]


def test_a_missing_cell_without_a_declared_value_is_an_error(tmp_path: Path) -> None:
    sex = {"type": "category", "categories": ["male", "female"]}
    pressure = {"type": "number", "range": [-1, 1]}
    strict = parse_columns(COLUMNS | {"sex": sex, "pressure": pressure})
    lines = [LINES[0], LINES[2], "?,Bob,1,,,male"]
    with pytest.raises(InvalidValueError, match=r"line 4, column pressure = '\?': is missing"):
        read_csv(table(tmp_path, lines), columns=strict)
    with pytest.raises(InvalidValueError, match=r"column sex = 'divers': must be one of male, fem"):
        read_csv(table(tmp_path, [LINES[3]]), columns=strict)


def test_every_usual_missing_cell_counts_as_missing() -> None:
    for cell in [*MISSING_CELLS, " ? ", "n/a", "999", "999.0", "9.99e2"]:
        cells = {"age": cell, "sex": "male", "stage": "1", "pressure": "0"}
        assert CODER.encode(cells)[0] == 0, cell
    named = parse_columns({"x": {"type": "category", "categories": ["NA", "EU"], "missing": "EU"}})
    assert named.encode({"x": "NA"}).tolist() == [1, 0]
    assert named.encode({"x": ""}).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": {"type": "nmber"}}, "columns.a.type = 'nmber': must be one of number, cat"),
        ({"a": {}}, "columns.a.type = None: must be one of"),
        ({"a": 3}, "columns.a = 3: must be a table"),
        ({"a": {"type": "number"}}, "columns.a.range = None: is missing"),
        ({"a": {"type": "number", "range": [3, 1]}}, r"columns.a.range = \[3.0, 1.0\]: must be \["),
        ({"a": {"type": "number", "range": [1, 1]}}, "must be .lowest, highest"),
        ({"a": {"type": "number", "range": [-1e308, 1e308]}}, "must be .lowest, highest"),
        ({"a": {"type": "number", "range": [0, float("inf")]}}, "finite"),
        ({"a": {"type": "number", "range": [0, True]}}, "columns.a.range = True: must be"),
        ({"a": {"type": "number", "range": [0, 1], "missing": 2}}, "must lie in the range"),
        ({"a": {"type": "number", "range": [0, 1], "missing": "mean"}}, "must be 'own'"),
        ({"a": {"type": "number", "range": [0, 1], "mising": 1}}, "columns.a.mising = 1: unknown"),
        ({"a": {"type": "category", "categories": []}}, "at least 1 item"),
        ({"a": {"type": "category", "categories": ["x", "x"]}}, "must all differ"),
        ({"a": {"type": "category", "categories": [1, "x"]}}, "must be a valid"),
        ({"a": {"type": "category", "categories": [" x"]}}, "no blanks at the start"),
        ({"a": {"type": "category", "categories": ["a\x1b"]}}, "no control characters"),
        ({"a": {"type": "category", "categories": ["x"], "missing": "y"}}, "one of the categories"),
        ({"a": {"type": "category", "categories": ["own"], "missing": "own"}}, "ambiguous"),
        ({"a": {"type": "drop", "range": [0, 1]}}, "unknown key, must be one of type"),
        ({"a": {"type": "drop"}}, "at least one column that is an input"),
        ({}, "at least one column"),
        ([1], "must be a table of columns"),
        ({"a\nb": {"type": "drop"}}, "no control characters"),
    ],
)  # fmt: skip
def test_faults_of_a_declaration_are_named(columns: object, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        parse_columns(columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (HEADER + ",height", "'height': must be declared"),
        (HEADER.replace(",age,", ",Age,"), "'Age': must be declared"),
        (HEADER.replace(",age,", ","), "'age': must be a column of"),
        (HEADER + ",age", "'age': is the name of two columns"),
    ],
)
def test_the_header_must_match_the_declaration(header: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_text(f"{header}\n")
    for keep_bad in (False, True):
        with pytest.raises(InvalidValueError, match=words):
            read_csv(path, columns=CODER, keep_bad=keep_bad)


def test_the_class_must_not_be_declared(tmp_path: Path) -> None:
    coder = parse_columns(COLUMNS | {"target": {"type": "drop"}})
    with pytest.raises(InvalidValueError, match="'target': is the class or the client"):
        read_csv(table(tmp_path, LINES), columns=coder)


# One record decides about itself only (guarantee 16).

HOSTILE = [
    "nan", "inf", "-Infinity", "1e999", "0x10", "1_000", "٣", "é", "\u2028", "\x00", "--1", "1.2.3",
    "'", "%s", "a" * 70, "=1+1", "\u202e", "-", "+", "e", ".", "1e", "own", "male female", "True",
]  # fmt: skip


@pytest.mark.parametrize("cell", HOSTILE)
@pytest.mark.parametrize("column", ["age", "pressure"])
def test_a_hostile_cell_of_a_number_column_costs_its_record_only(
    column: str, cell: str, tmp_path: Path
) -> None:
    names = HEADER.split(",")
    cells = ["0.5", "Ada", "0", "75", "1", "female"]
    cells[names.index(column)] = cell
    lines = [LINES[0], ",".join(cells), LINES[2]]
    with pytest.raises(InvalidValueError, match=f"line 3, column {column} = .*must be a finite"):
        read_csv(table(tmp_path, lines), columns=CODER)
    arrays = read_csv(table(tmp_path, lines), columns=CODER, keep_bad=True)
    assert np.isnan(arrays["inputs"][1]).all()
    assert arrays["targets"].tolist() == [0, -1, 1]
    np.testing.assert_array_equal(arrays["inputs"][[0, 2]], np.array([CODED[0], CODED[2]]))


@pytest.mark.parametrize("cell", HOSTILE)
def test_an_unknown_category_counts_as_missing(cell: str) -> None:
    coded = CODER.encode({"age": "75", "sex": cell, "stage": cell, "pressure": "0.5"})
    assert coded.tolist() == [0.5, 0, 0, 1, 0, 1, 0, 0.5, 0]


def test_fuzzing_one_line_changes_that_record_only(tmp_path: Path) -> None:
    rng = random.Random(7)
    before = read_csv(table(tmp_path, LINES), columns=CODER, keep_bad=True)
    pieces = [*(cell.encode() for cell in HOSTILE), b'"', b"\r", b"\xff", b",", b"", b"x" * 5000]
    others = [0, 1, 3, 4]
    bad = 0
    for _ in range(300):
        line = LINES[2].encode()
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(line) + 1)
            line = line[:start] + rng.choice(pieces) + line[start + rng.randrange(4) :]
        if not line.strip(b" \t"):
            continue
        path = table(tmp_path, [*LINES[:2], line, *LINES[3:]])
        after = read_csv(path, columns=CODER, keep_bad=True)
        assert len(after["targets"]) == len(LINES)
        np.testing.assert_array_equal(after["inputs"][others], before["inputs"][others])
        np.testing.assert_array_equal(after["targets"][others], before["targets"][others])
        row = after["inputs"][2]
        assert np.isnan(row).all() or (np.abs(row) <= 1).all()
        assert np.isnan(row).all() == (after["targets"][2] == -1)
        bad += int(after["targets"][2] == -1)
    assert 100 < bad < 300


CELLS = st.one_of(
    st.sampled_from(["", "?", "NA", "n/a", "male", "female", "1", "2.0", "3", "own", "999"]),
    st.floats(-200, 200).map(repr),
    st.text(max_size=8),
)
RECORDS = st.fixed_dictionaries(
    dict.fromkeys(("age", "sex", "stage", "pressure", "name", "target"), CELLS)
)


def coded_or_none(record: dict[str, str]) -> list[float] | None:
    try:
        return CODER.encode(record).tolist()
    except InvalidValueError:
        return None


@settings(deadline=None, max_examples=100)
@given(st.lists(RECORDS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_code_of_a_record_depends_on_that_record_alone(
    records: list[dict[str, str]], rng: random.Random
) -> None:
    """Any order, any other records: `code_rows`, which remembers cells, agrees with `encode`."""
    alone = [coded_or_none(record) for record in records]
    good = [(record, code) for record, code in zip(records, alone, strict=True) if code]
    rng.shuffle(good)
    header = ["target", "name", "pressure", "stage", "sex", "age"]
    roles = Roles("target", lambda cell: 0, None, lambda cell: "one")
    rows = [[record[name] for name in header] for record, _ in good]
    together = code_rows(rows, header, CODER, roles, "t", 1)
    np.testing.assert_array_equal(
        together.inputs, np.array([code for _, code in good]).reshape(-1, CODER.width)
    )
    for code in filter(None, alone):
        assert np.isfinite(code).all()
        assert (np.abs(code) <= 1).all()
        assert sum(code[1:4]) == 1
        assert sum(code[4:7]) == 1


# Where columns are used.


def test_one_file_for_each_client(tmp_path: Path) -> None:
    for name in ("berlin", "oslo"):
        table(tmp_path, LINES * 4, f"{name}.csv")
    clients = clients_from_files(tmp_path, columns=CODER)
    assert [client.train.inputs.shape for client in clients] == [(16, 9)] * 2
    data = dataset_from_csv(tmp_path, columns=CODER)
    assert data.group_names == ("berlin", "oslo")
    assert [client.name for client in split_dataset(data, partition="natural")] == [
        "berlin", "oslo",
    ]  # fmt: skip
    with pytest.raises(InvalidValueError, match="no file that ends in"):
        dataset_from_csv([save_npz(tmp_path / "a.npz")])


def save_npz(path: Path) -> Path:
    np.savez(path, inputs=np.zeros((2, 1)), targets=np.zeros(2))
    return path
