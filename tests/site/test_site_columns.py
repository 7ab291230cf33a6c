"""`[columns]` in a site's file: declared by the site, and a bad record is left out alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from site_cases import make_site

from noisewise.errors import InvalidValueError
from noisewise.site.site_file import load_site

COLUMNS = """
[columns.age]
type = "number"
range = [0, 100]
missing = 50

[columns.sex]
type = "category"
categories = ["m", "f"]
missing = "own"

[columns.name]
type = "drop"
"""
LINES = ["name,age,sex,target", "A,75,m,0", "B,?,f,1", "C,100,x,2"]


def site_with(folder: Path, lines: list[str], changes: dict[str, str] | None = None) -> Path:
    site = make_site(folder, records=60)
    text = site.read_text().replace("records.npz", "records.csv").replace("[1, 8, 8]", "[4]")
    text = text.replace("classes = 10", "classes = 3") + COLUMNS
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    site.write_text(text)
    (folder / "records.csv").write_text("\n".join(lines))
    return site


def test_a_site_codes_its_records(tmp_path: Path) -> None:
    data = load_site(site_with(tmp_path, LINES)).data()
    assert data.inputs.tolist() == [[0.5, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]
    assert data.targets.tolist() == [0, 1, 2]


@pytest.mark.parametrize("line", ["D,old,m,0", "D,75,m", "D,1e999,m,0", "D,75,m,7", "D,75,m,\x00"])
def test_a_bad_record_is_left_out_alone(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_site(site_with(tmp_path / "a", LINES)).data()
    with caplog.at_level(logging.WARNING):
        data = load_site(site_with(tmp_path / "b", [*LINES[:2], line, *LINES[2:]])).data()
    assert data.inputs.tolist() == whole.inputs.tolist()
    assert data.targets.tolist() == whole.targets.tolist()
    assert "1 of 4 records are left out" in caplog.text
    assert "old" not in caplog.text  # no value of a record


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"[4]": "[5]"}, r"site.toml: model.input_shape = \[5\]: must be \[4\]"),
        ({"range = [0, 100]": "range = [100, 0]"}, r"site.toml: columns.age.range = "),
        ({'type = "drop"': 'type = "dorp"'}, r"site.toml: columns.name.type = 'dorp'"),
        ({'file = "records.csv"': 'function = "m:f"'}, r"data.function = 'm:f': must be left out"),
    ],
)
def test_faults_of_the_declaration_are_named(
    changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidValueError, match=words):
        load_site(site_with(tmp_path, LINES, changes))


def test_columns_need_a_csv_file(tmp_path: Path) -> None:
    site = site_with(tmp_path, LINES, {"records.csv": "records.npz"})
    with pytest.raises(InvalidValueError, match=r"must end in .csv, because \[columns\] is given"):
        load_site(site).data()
