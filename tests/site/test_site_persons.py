"""Whose record each one is, in every kind of source: a bad value removes its own record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Noisewise
from safetensors.numpy import save_file
from site_cases import make_site, protect_persons

from noisewise.data.person_ids import NOBODY
from noisewise.errors import InvalidValueError
from noisewise.privacy.ledger import Ledger
from noisewise.site.loaded_site import keep_loaded
from noisewise.site.site_file import Site, load_site
from noisewise.site.site_persons import read_persons
from noisewise.site.site_records import usable_records
from noisewise.training import TensorData

N = 30
OWNERS = np.arange(N) % 10


def inputs() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, 1, 8, 8)).astype(np.float32)


TARGETS = np.arange(N) % 10


def npz_site(folder: Path, owners: Any, **more: Any) -> Path:
    site = make_site(folder, records=N, batch=5)
    arrays = {"inputs": inputs(), "targets": TARGETS, "patient": owners, **more}
    np.savez(folder / "records.npz", **{k: v for k, v in arrays.items() if v is not None})
    protect_persons(site, 10, 2, column="patient")
    return site


def groups(data: TensorData) -> set[frozenset[bytes]]:
    """The records of each person, whatever the order of persons and records is."""
    assert data.persons is not None
    return {
        frozenset(data.tensor[one].numpy().tobytes() for one in data.persons.of_person(person))
        for person in range(len(data.persons))
    }


def expected(left_out: set[int]) -> set[frozenset[bytes]]:
    x = inputs()
    people = [
        frozenset(x[n].tobytes() for n in range(N) if OWNERS[n] == owner and n not in left_out)
        for owner in range(10)
    ]
    return {person for person in people if person}


# ---------------------------------------------------------------- values

NOT_PERSONS: list[object] = [
    None, "", "  ", 2.5, float("nan"), float("inf"), 1e300, True, [1], {}, "2.5", ".5", "nan",
    "None", "NULL", b"<NA>", np.float32(0.25), "1.5e3", object(),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_PERSONS, ids=lambda v: repr(v).partition(" at 0x")[0])
def test_a_value_that_names_nobody_removes_its_record_alone(value: object) -> None:
    owners: list[object] = list(OWNERS)
    owners[7] = value
    numbers = read_persons(owners, "persons")
    assert numbers[7] == NOBODY
    others = np.delete(numbers, 7)
    assert others.min() == 0
    data = usable_records(inputs(), TARGETS, (1, 8, 8), 10, "data", persons=numbers)
    assert groups(data) == expected({7})


@pytest.mark.parametrize(
    "owners",
    [
        OWNERS, OWNERS.astype(np.uint8), OWNERS.astype(np.float64), OWNERS.astype(np.float32),
        OWNERS.astype(str), OWNERS.astype("S3"), OWNERS.astype(object), OWNERS.tolist(),
        [float(one) for one in OWNERS], [f"{one}.0" for one in OWNERS], [f" {o} " for o in OWNERS],
        -OWNERS, OWNERS + 2**40,
    ],
    ids=[
        "int64", "uint8", "float64", "float32", "str", "bytes", "object", "list of int",
        "list of float", "list of text with .0", "list of text with spaces", "negative", "large",
    ],
)  # fmt: skip
def test_whole_numbers_and_text_name_persons(owners: object) -> None:
    assert read_persons(owners, "persons").tolist() == OWNERS.tolist()


def test_fractions_in_an_array_remove_their_records_alone() -> None:
    owners = OWNERS.astype(np.float64)
    owners[[3, 7, 11, 12]] = [0.5, np.nan, np.inf, 1e300]
    numbers = read_persons(owners, "persons")
    assert np.flatnonzero(numbers == NOBODY).tolist() == [3, 7, 11, 12]
    kept = numbers != NOBODY
    assert len(set(zip(numbers[kept].tolist(), OWNERS[kept].tolist(), strict=True))) == 10


@pytest.mark.parametrize(
    "owners", [None, np.zeros((N, 1), np.int64), np.array(3), OWNERS > 3, OWNERS * 1j]
)
def test_another_form_is_an_error_whatever_the_values_are(owners: object) -> None:
    with pytest.raises(InvalidValueError, match="who"):
        read_persons(owners, "who")


# ---------------------------------------------------------------- sources


def csv_site(folder: Path, owners: list[str], header: str = "patient") -> Path:
    site = make_site(folder, records=N, batch=5)
    text = site.read_text().replace("records.npz", "records.csv").replace("[1, 8, 8]", "[64]")
    site.write_text(text)
    lines = [f"{header}," + ",".join(f"c{n}" for n in range(64)) + ",target"]
    for owner, row, target in zip(owners, inputs().reshape(N, 64), TARGETS, strict=True):
        lines.append(f"{owner},{','.join(str(float(value)) for value in row)},{target}")
    (folder / "records.csv").write_text("\n".join(lines))
    protect_persons(site, 10, 2, column="patient")
    return site


@pytest.mark.parametrize("value", ["", " ", "2.5", "nan", "None", '"', "3\r"])
def test_a_bad_cell_of_a_table_removes_its_line_alone(tmp_path: Path, value: str) -> None:
    owners = [f"p-{one}" for one in OWNERS]
    owners[7] = value
    data = load_site(csv_site(tmp_path / "site", owners)).data()
    assert data.tensor.shape == (N - 1, 64)  # the column of persons is no input
    assert groups(data) == expected({7})


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_arrays_of_a_container(tmp_path: Path, suffix: str) -> None:
    owners = OWNERS.astype(np.float64)
    owners[7] = np.nan
    site = npz_site(tmp_path / "site", owners)
    if suffix == "safetensors":
        with np.load(tmp_path / "site" / "records.npz") as file:
            save_file(dict(file), tmp_path / "site" / "records.safetensors")
        site.write_text(site.read_text().replace("records.npz", "records.safetensors"))
    data = load_site(site).data()
    assert data.tensor.shape == (N - 1, 1, 8, 8)
    assert groups(data) == expected({7})


def test_a_bad_input_or_target_removes_its_record_from_its_person(tmp_path: Path) -> None:
    x, y = inputs(), TARGETS.copy()
    x[4, 0, 0, 0], y[15] = np.nan, 77
    site = npz_site(tmp_path / "site", OWNERS, inputs=x, targets=y)
    for loaded in (load_site(site), keep_loaded(load_site(site))):
        data = loaded.data()
        assert groups(data) == expected({4, 15})
        assert loaded.data().count("person") == 10
    nothing = npz_site(tmp_path / "other", OWNERS, inputs=np.full_like(x, np.nan))
    assert load_site(nothing).data().count("person") == 0


def test_a_record_without_features_leaves_its_person(tmp_path: Path) -> None:
    x = inputs()
    x[4] = 0.0  # the map divides by the norm
    site = npz_site(tmp_path / "site", OWNERS, inputs=x)
    text = site.read_text().replace("input_shape = [1, 8, 8]", "input_shape = [64]")
    text += '\n[features]\nname = "own_map:unit"\ninput_shape = [1, 8, 8]\nnormalise = "none"\n'
    site.write_text(text)
    (tmp_path / "own_map.py").write_text(MAP)
    for _ in range(2):  # computed, then read from the cache
        data = with_own_modules(tmp_path, site).data()
        assert data.tensor.shape == (N - 1, 64)
        assert data.persons is not None
        sizes = sorted(len(data.persons.of_person(person)) for person in range(10))
        assert sizes == [2, *[3] * 9]
        where = {row.numpy().tobytes(): n for n, row in enumerate(data.tensor)}
        assert len(where) == N - 1
        owners = np.delete(OWNERS, 4)
        pairs = set(zip(data.persons.owners.tolist(), owners.tolist(), strict=True))
        assert len(pairs) == 10


MAP = """
from torch import nn

class Unit(nn.Module):
    def forward(self, x):
        flat = x.flatten(1)
        return flat / flat.norm(dim=1, keepdim=True)

def unit(shape):
    return Unit()
"""

FUNCTIONS = """
import numpy as np

X = np.random.default_rng(0).standard_normal((30, 1, 8, 8)).astype(np.float32)
Y, WHO = np.arange(30) % 10, [str(n % 10) for n in range(30)]

def arrays():
    return X, Y, np.arange(30) % 10

def lists():
    return list(X), list(Y), [*WHO[:7], 2.5, *WHO[8:]]

class Records:
    def __len__(self):
        return 30
    def __getitem__(self, number):
        if number == 7:
            return X[7], Y[7]  # says nothing about a person
        return X[number], Y[number], WHO[number]

def pair():
    return X, Y

def nobody():
    return X, Y, None
"""


def with_own_modules(folder: Path, site: Path) -> Site:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return load_site(site)


@pytest.mark.parametrize(("name", "bad"), [("arrays", set()), ("lists", {7}), ("Records", {7})])
def test_functions_return_persons_as_a_third_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bad: set[int]
) -> None:
    (tmp_path / "own_person_records.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    site = npz_site(tmp_path / "site", OWNERS)
    text = site.read_text().replace('person = "patient"\n', "")
    site.write_text(text.replace('file = "records.npz"', f'function = "own_person_records:{name}"'))
    assert groups(load_site(site).data()) == expected(bad)


@pytest.mark.parametrize("name", ["pair", "nobody"])
def test_a_function_without_persons_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "own_person_records.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    site = npz_site(tmp_path / "site", OWNERS)
    text = site.read_text().replace('person = "patient"\n', "")
    site.write_text(text.replace('file = "records.npz"', f'function = "own_person_records:{name}"'))
    with pytest.raises(InvalidValueError, match="persons"):
        load_site(site).data()


def test_a_missing_column_or_array_is_one_line_at_the_start(tmp_path: Path) -> None:
    table = csv_site(tmp_path / "table", ["a"] * N, header="somebody")
    container = npz_site(tmp_path / "container", None)
    held_out = npz_site(tmp_path / "held_out", OWNERS, test_inputs=inputs(), test_targets=TARGETS)
    for site, name in ((table, "patient"), (container, "patient"), (held_out, "test_patient")):
        with pytest.raises(InvalidValueError, match=r"data\.person") as caught:
            keep_loaded(load_site(site))  # what a vault does at its start
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    short = npz_site(tmp_path / "short", OWNERS[1:])
    with pytest.raises(InvalidValueError, match="must be one value for each of 30 inputs"):
        load_site(short).data()


# ---------------------------------------------------------------- the site's file


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('unit = "person"', 'unit = "people"', "budget.unit"),
        ("max_records = 2\n", "", "budget.max_records"),
        ("max_records = 2", "max_records = 0", "budget.max_records"),
        ('unit = "person"\n', "", "budget.max_records"),
        ('unit = "person"\nmax_records = 2\n', "", "data.records"),
        ("persons = 10", "records = 10", "data.persons"),
        ("persons = 10", "persons = 10\nrecords = 30", "data.records"),
        ('person = "patient"\n', "", "data.person"),
    ],
)
def test_units_that_make_no_sense_are_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    site = npz_site(tmp_path / "site", OWNERS)
    assert old in site.read_text()
    site.write_text(site.read_text().replace(old, new))
    with pytest.raises(InvalidValueError, match=message) as caught:
        load_site(site)
    assert "\n" not in str(caught.value)


def test_a_column_of_persons_needs_a_budget_for_persons(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", records=N)
    site.write_text(site.read_text().replace("[model]", 'person = "who"\n\n[model]'))
    with pytest.raises(InvalidValueError, match=r"data.person.*must be left out"):
        load_site(site)


# ---------------------------------------------------------------- what the site's people see


def test_check_and_ledger_commands_name_the_unit(tmp_path: Path, noisewise: Noisewise) -> None:
    owners = OWNERS.copy()
    owners[:8] = 3
    site = npz_site(tmp_path / "site", owners)
    site.write_text(site.read_text() + "\n[declaration]\npublish = true\n")
    ledger = site.parent / "site.ledger"
    done = noisewise("flower", "check", str(site))
    assert done.returncode == 0
    assert "data.persons = 10 is exactly the number of usable persons" in done.stdout
    assert "the budget protects each person with all of their records (30 records)" in done.stdout
    assert "at most 2 of a person, chosen at random; " in done.stdout
    assert "receive unit person, epsilon 8" in done.stdout
    assert "for each single person" in noisewise("ledger", "show", str(ledger)).stdout
    page = site.parent / "statement.html"
    assert noisewise("ledger", "export", str(ledger), "-o", str(page)).returncode == 0
    text = page.read_text()
    assert "each single <b>person</b>, with all of their records" in text
    assert "A record is not a person" not in text
    report = site.parent / "assessment.md"
    command = ("ledger", "assessment", str(ledger), "--site", str(site), "-o", str(report))
    assert noisewise(*command).returncode == 0
    text = report.read_text()
    assert "persons, as declared in the site's file | 10" in text
    assert "records of one person that a step uses | at most 2" in text
    assert "A person has several records" not in text


def test_ledger_init_has_a_unit(tmp_path: Path, noisewise: Noisewise) -> None:
    path = tmp_path / "ward.ledger"
    promise = ("--dataset", "ward", "--epsilon", "2", "--delta", "1e-2")
    done = noisewise("ledger", "init", str(path), *promise, "--unit", "person", "--records", "400")
    assert done.returncode == 0
    assert "for each person of 'ward'" in done.stdout
    assert "1/persons = 1/400" in done.stdout + done.stderr
    with Ledger.inspect(path) as ledger:
        assert ledger.statement().unit == "person"
    site = npz_site(tmp_path / "site", OWNERS)
    text = site.read_text().replace('unit = "person"\nmax_records = 2\n', "")
    site.write_text(text.replace('persons = 10\nperson = "patient"', "records = 30"))
    shown = noisewise("ledger", "show", str(site.parent / "site.ledger"), "--site", str(site))
    assert shown.returncode == 2
    assert "unit person" in shown.stderr
    assert noisewise("ledger", "init", str(tmp_path / "x"), *promise, "--unit", "x").returncode == 2
