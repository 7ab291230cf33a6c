"""Persons in data: columns and arrays that say whose record it is, and splits by person."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from noisewise.data.csv_records import read_csv
from noisewise.data.custom import dataset_from_arrays, dataset_from_rows
from noisewise.data.examples import Examples, count_units
from noisewise.data.own_files import clients_from_files, dataset_from_csv, dataset_from_files
from noisewise.data.partition import hold_out, split_dataset
from noisewise.data.person_ids import NOBODY, number_persons
from noisewise.data.person_split import with_made_up_persons
from noisewise.errors import InvalidValueError

CSV = "a,who,b,target\n1,x 1,2,0\n3,y,4,1\n5, x 1 ,6,0\n7,z,8,1\n"


def written(folder: Path, text: str = CSV, name: str = "site.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ---------------------------------------------------------------- who is who


def test_numbers_and_text_name_the_same_person() -> None:
    values = [7, "7", " 7 ", b"7", np.int64(7), np.str_("7"), "07", "seven"]
    assert number_persons(values, 8, "persons").tolist() == [0, 0, 0, 0, 0, 0, 1, 2]


def test_values_that_name_nobody() -> None:
    values = [None, "", "  ", 1.0, float("nan"), True, [1], {}, "a"]
    assert number_persons(values, 9, "persons").tolist() == [NOBODY] * 8 + [0]


@pytest.mark.parametrize("values", [np.array([5, -1, 5]), np.array(["b", "a", "b"])])
def test_arrays_are_numbered_by_first_use(values: np.ndarray) -> None:
    assert number_persons(values, 3, "persons").tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "values",
    [np.array([1.0, 2.0]), np.array([True, False]), np.zeros((2, 1), np.int64), np.arange(3), None],
)
def test_another_type_or_length_is_refused_whatever_the_values_are(values: object) -> None:
    with pytest.raises(InvalidValueError, match="who"):
        number_persons(values, 2, "who")


# ---------------------------------------------------------------- files


def test_a_column_of_a_csv_file_is_no_input(tmp_path: Path) -> None:
    arrays = read_csv(written(tmp_path), person="who")
    assert arrays["persons"].tolist() == [0, 1, 0, 2]
    assert arrays["inputs"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert arrays["targets"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("person", ["nobody", "target", "a,b"])
def test_the_column_must_exist_and_be_no_target(tmp_path: Path, person: str) -> None:
    with pytest.raises(InvalidValueError, match="person"):
        read_csv(written(tmp_path), person=person)


def test_blank_persons_and_bad_cells_are_named(tmp_path: Path) -> None:
    blank = written(tmp_path, CSV + "9, ,9,0\n")
    with pytest.raises(InvalidValueError, match="line 6, column who"):
        read_csv(blank, person="who")
    assert read_csv(blank, person="who", keep_bad=True)["persons"].tolist() == [0, 1, 0, 2, NOBODY]
    bad = written(tmp_path, CSV + "9,y,oops,0\n")
    with pytest.raises(InvalidValueError, match="line 6, column b"):
        read_csv(bad, person="who")
    kept = read_csv(bad, person="who", keep_bad=True)
    assert kept["persons"].tolist() == [0, 1, 0, 2, NOBODY]
    assert np.isnan(kept["inputs"][4]).all()


def test_persons_of_two_files_are_different_persons(tmp_path: Path) -> None:
    files = [written(tmp_path, CSV, name) for name in ("one.csv", "two.csv")]
    for dataset in (dataset_from_csv(files, person="who"), dataset_from_files(files, person="who")):
        assert dataset.train.persons is not None
        assert len(set(dataset.train.persons.tolist())) == 6
    assert dataset_from_csv(files, columns=None, person="who").train.input_shape == (2,)


def test_persons_of_npz_files(tmp_path: Path) -> None:
    arrays = {"inputs": np.eye(4), "targets": np.arange(4)}
    np.savez(tmp_path / "one.npz", **arrays, persons=np.array(["p", "q", "p", "r"]))
    [client] = clients_from_files(tmp_path, test_fraction=0.4)
    assert count_units(client.train, "person") == 2
    assert client.test.persons is not None
    np.savez(tmp_path / "one.npz", **arrays)
    with pytest.raises(InvalidValueError, match="array persons"):
        dataset_from_files(tmp_path, person="who")


def test_parquet_columns_are_refused_by_their_type(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"x": [1.0, 2.0], "who": ["a", "b"], "weight": [7.0, 8.0], "target": [0, 1]}
    parquet.write_table(pyarrow.table(table), tmp_path / "one.parquet")
    dataset = dataset_from_files(tmp_path, person="who")
    assert dataset.train.persons is not None
    assert dataset.train.input_shape == (2,)
    with pytest.raises(InvalidValueError, match="column weight = 'double'"):
        dataset_from_files(tmp_path, person="weight")


def test_rows_have_a_column_of_persons() -> None:
    rows = [{"x": [1.0], "who": "a", "label": 0}, {"x": [2.0], "who": "a", "label": 1}]
    dataset = dataset_from_rows(rows, person="who")
    assert list(dataset.train.named_inputs()) == ["inputs.x"]
    assert dataset.train.persons is not None
    assert dataset.train.persons.tolist() == [0, 0]
    with pytest.raises(InvalidValueError, match="person"):
        dataset_from_rows(rows, person="whom")


def test_blanks_in_own_arrays_name_the_record() -> None:
    with pytest.raises(InvalidValueError, match="persons, record 1"):
        dataset_from_arrays(np.eye(3), [0, 1, 0], persons=["a", "", "b"])


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize("partition", ["iid", "quantity", "shards", "dirichlet"])
def test_splits_keep_the_records_of_a_person_together(partition: str) -> None:
    owners = np.repeat(np.arange(60), np.arange(60) % 4 + 1)
    n = len(owners)
    dataset = dataset_from_arrays(np.arange(n)[:, None], owners % 3, persons=owners)
    options: dict[str, float] = {"shards": {"max_labels": 2}}.get(partition, {})
    if partition in ("quantity", "dirichlet"):
        options = {"alpha": 5.0}
    clients = split_dataset(dataset, 3, partition=partition, **options)  # type: ignore[arg-type]
    parts = [part for client in clients for part in (client.train, client.test)]
    people = [set(part.persons.tolist()) for part in parts]  # type: ignore[union-attr]
    assert sum(map(len, people)) == len(set.union(*people)) == 60
    assert sorted(int(x) for part in parts for x in part.array.ravel()) == list(range(n))
    for part in parts:
        assert part.array.ravel().tolist() == sorted(part.array.ravel().tolist())
        assert part.persons is not None
        assert (owners[part.array.ravel()] == part.persons).all()


def test_a_client_with_one_person_cannot_hold_out() -> None:
    records = Examples(np.zeros((3, 1), np.float32), np.arange(3), persons=np.zeros(3, np.int64))
    with pytest.raises(InvalidValueError, match=r"1 person\(s\)"):
        hold_out(records, 0.5, 0, 0)


def test_made_up_persons() -> None:
    records = Examples(np.zeros((5, 1), np.float32), np.arange(5))
    made = with_made_up_persons(records, 2)
    assert made.persons is not None
    assert made.persons.tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(InvalidValueError, match="records_per_person"):
        with_made_up_persons(made, 2)
    with pytest.raises(InvalidValueError, match="persons"):
        count_units(records, "person")
