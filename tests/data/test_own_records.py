"""Own records keep their types: ids, several inputs, fractions as targets, declared lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from noisewise.data import (
    clients_from_files,
    dataset_from_arrays,
    dataset_from_files,
    dataset_from_rows,
    dataset_from_torch,
    next_tokens,
    pad_sequences,
    split_dataset,
)
from noisewise.errors import InvalidValueError
from noisewise.federation.clients import to_tensors


def test_float_targets_are_never_truncated() -> None:
    pairs = [(np.zeros(2), 1.636), (np.ones(2), 0.25)]
    with pytest.raises(InvalidValueError, match="one whole number"):
        dataset_from_torch(pairs)
    made = dataset_from_torch(pairs, values=True)
    np.testing.assert_allclose(made.train.targets, [1.636, 0.25], rtol=1e-6)
    assert made.n_classes is None


def test_token_ids_in_uint8_are_not_divided() -> None:
    ids = np.array([[1, 200], [3, 255]], np.uint8)
    tensors = to_tensors(dataset_from_arrays(ids, [0, 1]).train)
    assert tensors.tensor.dtype == torch.int64
    assert tensors.tensor.tolist() == ids.tolist()
    pixels = to_tensors(dataset_from_arrays(ids, [0, 1], images=True).train).tensor
    assert torch.equal(pixels, torch.tensor(ids.astype(np.float32) / np.float32(255)))
    numbers = to_tensors(dataset_from_arrays(ids, [0, 1], dtype="float32").train).tensor
    assert numbers.dtype == torch.float32
    assert numbers.tolist() == ids.tolist()


def test_a_tuple_of_tensors_is_not_stacked() -> None:
    pairs = [((torch.arange(3), torch.ones(3)), k % 2) for k in range(4)]
    inputs = dataset_from_torch(pairs).train.inputs
    assert isinstance(inputs, tuple)
    assert [part.shape for part in inputs] == [(4, 3), (4, 3)]
    assert [part.dtype for part in inputs] == [np.int64, np.float32]


def test_inputs_by_name_survive_a_split() -> None:
    rng = np.random.default_rng(0)
    arrays = {"ids": rng.integers(0, 9, (30, 4)), "mask": np.ones((30, 4), np.int64)}
    for client in split_dataset(dataset_from_arrays(arrays, np.arange(30) % 3), 3):
        data = to_tensors(client.train)
        assert isinstance(data.inputs, Mapping)
        assert list(data.inputs) == ["ids", "mask"]
        assert len(data.inputs["ids"]) == len(data.targets)


def test_lengths_are_declared_and_never_the_longest() -> None:
    ids, mask = pad_sequences([[1, 2, 3], [4]], 2)
    assert (ids.tolist(), mask.tolist()) == ([[1, 2], [4, 0]], [[1, 1], [1, 0]])
    ragged = [(np.arange(1, n + 1), n % 2) for n in (1, 2, 5)]
    with pytest.raises(InvalidValueError, match="length"):
        dataset_from_torch(ragged)
    short = dataset_from_torch(ragged, length=3).train.inputs
    longer = dataset_from_torch([*ragged, (np.arange(50), 0)], length=3).train.inputs
    np.testing.assert_array_equal(short, np.asarray(longer)[:3])
    with pytest.raises(InvalidValueError, match="record 1 = 'shape \\[0\\]'"):
        pad_sequences([[1], []], 3)


def test_targets_that_are_sequences_are_filled_with_the_ignored_number() -> None:
    pairs = [([1, 2, 3], [2, 3, 4]), ([5], [6])]
    made = dataset_from_torch([(np.array(a), np.array(b)) for a, b in pairs], values=True, length=3)
    assert made.train.targets.tolist() == [[2, 3, 4], [6, -100, -100]]


def test_the_next_token_is_the_target() -> None:
    inputs, targets = next_tokens(np.arange(10, dtype=np.uint8), 4)
    np.testing.assert_array_equal(targets, inputs + 1)
    with pytest.raises(InvalidValueError, match="more than 4"):
        next_tokens([1, 2, 3, 4], 4)


class Tokenizer:
    """Called as a Hugging Face tokenizer is; pads to what it is told."""

    def __call__(self, texts: list[str], padding: str, truncation: bool, max_length: int) -> Any:
        assert padding == "max_length"
        assert truncation
        rows = [[ord(c) for c in text][:max_length] for text in texts]
        fill = [max_length - len(row) for row in rows]
        return {
            "input_ids": [row + [0] * n for row, n in zip(rows, fill, strict=True)],
            "attention_mask": [[1] * len(r) + [0] * n for r, n in zip(rows, fill, strict=True)],
        }


def test_rows_with_a_tokenizer() -> None:
    rows = [{"text": "abc", "label": 1, "site": "x"}, {"text": "d", "label": 0, "site": "y"}]
    made = dataset_from_rows(rows, tokenizer=Tokenizer(), length=2, n_classes=2, client="site")
    assert isinstance(made.train.inputs, Mapping)
    assert made.train.inputs["input_ids"].tolist() == [[97, 98], [100, 0]]
    assert made.group_names == ("x", "y")
    for bad, said in (
        ({"tokenizer": Tokenizer()}, "length"),
        ({"tokenizer": Tokenizer(), "length": 2, "label": "class"}, "class"),
    ):
        with pytest.raises(InvalidValueError, match=said):
            dataset_from_rows(rows, **bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="at least one token"):
        dataset_from_rows([{"text": "", "label": 0}], tokenizer=Tokenizer(), length=2)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_with_several_inputs(suffix: str, tmp_path: Path) -> None:
    for number in range(2):
        arrays = {
            "inputs.ids": np.arange(20).reshape(10, 2) + number,
            "inputs.mask": np.ones((10, 2), np.int64),
            "targets": np.linspace(0, 1, 10),
        }
        path = tmp_path / f"client-{number}{suffix}"
        np.savez(path, **arrays) if suffix == ".npz" else save_file(arrays, path)
    made = dataset_from_files(tmp_path, values=True)
    assert isinstance(made.train.inputs, Mapping)
    assert made.train.inputs["ids"].dtype == np.int64
    assert made.group_names == ("client-0", "client-1")
    assert len(clients_from_files(tmp_path, values=True)) == 2
    with pytest.raises(InvalidValueError, match="targets"):
        dataset_from_files(tmp_path)


def test_csv_with_numbers_to_predict(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,target\n1,1.636\n2,-0.5\n")
    (tmp_path / "b.csv").write_text("x,target\n3,7\n4,8.5\n")
    made = dataset_from_files(tmp_path, values=True)
    np.testing.assert_allclose(made.train.targets, [1.636, -0.5, 7, 8.5], rtol=1e-6)
    (tmp_path / "b.csv").write_text("x,target\n3,nan\n4,8.5\n")
    with pytest.raises(InvalidValueError, match="line 2, column target"):
        dataset_from_files(tmp_path, values=True)


@pytest.mark.extras
def test_parquet_files(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    def write(name: str, columns: dict[str, Any]) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / name)
        return tmp_path / name

    table = write("table.parquet", {"a": [1.5, 2.5], "b": [3, 4], "target": [0, 1]})
    made = dataset_from_files([table])
    assert np.asarray(made.train.inputs).tolist() == [[1.5, 3.0], [2.5, 4.0]]
    lists = write("lists.parquet", {"ids": [[1, 2, 3], [4]], "target": [0, 1]})
    with pytest.raises(InvalidValueError, match="length"):
        dataset_from_files([lists])
    inputs = dataset_from_files([lists], length=2).train.inputs
    assert isinstance(inputs, Mapping)
    assert inputs["ids"].tolist() == [[1, 2], [4, 0]]
    holes = write("holes.parquet", {"a": [1.0, None], "target": [0, 1]})
    with pytest.raises(InvalidValueError, match="1 missing cells"):
        dataset_from_files([holes])
    lists.write_bytes(lists.read_bytes()[:-9])
    with pytest.raises(InvalidValueError, match="cannot be read"):
        dataset_from_files([lists], length=2)


BAD = np.where(np.arange(24).reshape(8, 3) == 10, np.nan, 1.0)


@pytest.mark.parametrize(
    ("inputs", "targets", "options", "said"),
    [
        ([[1, 2], [3]], [0, 1], {}, "inputs = 'list': must be an array of numbers, all records"),
        (np.ones((2, 1)), [[1], [1, 2]], {"values": True}, "targets = 'list': must be an array"),
        ({"a": {"b": np.ones((2, 1))}}, [0, 1], {}, "a = 'dict': must be an array: flatten"),
        (BAD, [0] * 8, {}, "inputs, record 3 = 'nan or inf': must be finite"),
        ({"x": BAD}, [0] * 8, {}, "x, record 3 = 'nan or inf'"),
        (np.ones((3, 1)), [0, 5, 1], {"n_classes": 2}, "targets, record 1 = 5: must be in 0..1"),
        (np.ones((3, 1)), [0, 1, -1], {}, "targets, record 2 = -1: must be whole numbers >= 0"),
    ],
    ids=str,
)
def test_bad_arrays_are_one_line(
    inputs: Any, targets: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        dataset_from_arrays(inputs, targets, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_of_any_type_are_read() -> None:
    half = torch.rand(4, 2).bfloat16()
    made = dataset_from_arrays(half, [0, 1, 0, 1]).train
    np.testing.assert_array_equal(made.inputs, half.float().numpy())
    graph = torch.rand(4, 2, requires_grad=True)
    targets = torch.rand(4).bfloat16().requires_grad_()
    made = dataset_from_arrays(graph, targets, values=True).train
    np.testing.assert_array_equal(made.inputs, graph.detach().numpy())
    assert made.targets.dtype == np.float32


def test_whole_numbers_that_int64_cannot_hold_are_refused() -> None:
    huge = np.array([[0], [2**63]], np.uint64)
    with pytest.raises(InvalidValueError, match=r"inputs, record 1 = 9223372036854775808: must be"):
        dataset_from_arrays(huge, [0, 1])
    with pytest.raises(InvalidValueError, match=r"targets, record 1 = 9223372036854775808"):
        dataset_from_arrays(np.zeros((2, 1)), huge[:, 0], values=True)


def test_targets_that_float32_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"targets, record 1 = 'nan or inf'"):
        dataset_from_arrays(np.zeros((2, 1)), [0.0, 1e300], values=True)


def test_a_third_item_of_a_record_is_not_dropped() -> None:
    triples = [(np.arange(3), np.ones(3), np.arange(3))] * 4
    with pytest.raises(InvalidValueError, match=r"record 0 = '3 items': must be a pair"):
        dataset_from_torch(triples, values=True)


@pytest.mark.extras
@pytest.mark.parametrize("cell", [[1, None], [1.5, None], ["a"]], ids=str)
def test_lists_without_numbers_in_parquet_are_refused(cell: list[Any], tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "lists.parquet"
    good = [type(cell[0])(2)]
    parquet.write_table(pyarrow.table({"a": [good, cell], "target": [0, 1]}), path)
    first = int(isinstance(cell[0], int | float))  # strings are refused in every record
    with pytest.raises(InvalidValueError, match=rf"record {first} = .* must be a list of numbers"):
        dataset_from_files([path], length=2)


@pytest.mark.extras
def test_uneven_lists_of_lists_in_parquet_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "lists.parquet"
    parquet.write_table(pyarrow.table({"a": [[[1], [2, 3]]], "target": [0]}), path)
    with pytest.raises(InvalidValueError, match="must have equal lengths"):
        dataset_from_files([path], length=2)
