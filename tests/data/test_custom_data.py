"""A user's own records: CSV files, archives, arrays and torch datasets."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils.data import TensorDataset

from noisewise.data import (
    clients_from_files,
    clients_from_torch,
    count_classes,
    dataset_from_arrays,
    dataset_from_torch,
    make_specs,
    split_dataset,
)
from noisewise.errors import InvalidValueError

RNG = np.random.default_rng(0)


def arrays(n: int = 20, features: int = 3) -> dict[str, np.ndarray]:
    return {
        "inputs": RNG.normal(size=(n, features)).astype(np.float32),
        "targets": np.arange(n) % 4,
    }


def save(path: Path, content: dict[str, np.ndarray]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        rows = [
            f"{','.join(map(repr, x.tolist()))},{y}"
            for x, y in zip(content["inputs"], content["targets"], strict=True)
        ]
        path.write_text("a,b,c,target\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".csv"])
def test_one_file_for_each_client(tmp_path: Path, suffix: str) -> None:
    contents = [arrays(20), arrays(40)]
    files = [save(tmp_path / f"site-{i}{suffix}", c) for i, c in enumerate(contents)]
    clients = clients_from_files(files)
    assert [(len(c.train), len(c.test)) for c in clients] == [(16, 4), (32, 8)]
    assert count_classes(clients) == 4
    for client, content in zip(clients, contents, strict=True):
        back = np.concatenate([client.train.inputs, client.test.inputs])
        order, expected = np.lexsort(back.T), np.lexsort(content["inputs"].T)
        np.testing.assert_allclose(back[order], content["inputs"][expected], rtol=1e-6)
        labels = np.concatenate([client.train.targets, client.test.targets])
        np.testing.assert_array_equal(labels[order], content["targets"][expected])
    folder = clients_from_files(tmp_path)
    np.testing.assert_array_equal(folder[1].test.inputs, clients[1].test.inputs)
    other = clients_from_files(tmp_path, seed=1)
    assert not np.array_equal(other[1].test.inputs, clients[1].test.inputs)
    specs = make_specs(clients, epsilons=[1.0, 2.0], batch_sizes=8, delta=1e-4)
    assert [spec.n_examples for spec in specs] == [16, 32]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_may_bring_test_records(tmp_path: Path, suffix: str) -> None:
    content = {
        **arrays(10),
        "test_inputs": np.ones((3, 3), np.float32),
        "test_targets": np.arange(3),
    }
    (client,) = clients_from_files([save(tmp_path / f"a{suffix}", content)])
    assert (len(client.train), len(client.test)) == (10, 3)


def test_csv_with_names_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("diagnosis, age,weight\nill,50,60.5\nwell,40,70\n\nill,3e1,80\nwell,1,2\n")
    (client,) = clients_from_files(
        [path], target="diagnosis", classes=["well", "ill"], test_fraction=0.5
    )
    assert sorted(client.train.targets.tolist() + client.test.targets.tolist()) == [0, 0, 1, 1]
    assert client.train.inputs.shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "must be one of the columns"),
        ("a,b\n1,2\n", {}, "must be one of the columns"),
        ("target\n1\n", {}, "must be one of the columns"),
        ("a,target\n1,0\nx,1\n", {}, r"line 3, column a = 'x': must be a finite"),
        ("a,target\n1,0\nnan,1\n", {}, "column a"),
        ("a,target\n1,0\n,1\n", {}, "column a"),
        ("a,target\n1,0\n1,-1\n", {}, "column target"),
        ("a,target\n1,0\n1,0.5\n", {}, "column target"),
        ("a,target\n1,0\n1\n", {}, "line 3 has 1 cells"),
        ("a,target\n1,yes\n", {"classes": ["no"]}, "must be one of no"),
        ("a,target\n", {}, "at least one"),
        ("a,target\n1,0\n", {}, "1 to train and 1 to test"),
        ("a,target\n1,0\n2,1\n", {"max_bytes": 5}, "more than 5"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, options: dict, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InvalidValueError, match=words):
        clients_from_files(tmp_path, **options)


def npz_claiming(shape: tuple[int, ...]) -> bytes:
    """An npz whose header promises more than there is."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"1234"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("inputs.npy", member)
        archive.writestr("targets.npy", member)
    return buffer.getvalue()


def test_bad_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    objects = np.array([{"a": 1}] * 4, dtype=object)
    np.savez(path, inputs=objects, targets=np.arange(4))
    with pytest.raises(InvalidValueError, match=r"a\.npz"):
        clients_from_files([path])
    path.write_bytes(npz_claiming((1 << 40,)))
    with pytest.raises(InvalidValueError, match="damaged"):
        clients_from_files([path])
    np.savez_compressed(
        path, inputs=np.zeros((10_000, 100), np.float32), targets=np.zeros(10_000, int)
    )
    assert path.stat().st_size < 100_000
    with pytest.raises(InvalidValueError, match="more than 1000000"):
        clients_from_files([path], max_bytes=1_000_000)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InvalidValueError, match="cannot be read"):
        clients_from_files([path])
    np.savez(path, x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(InvalidValueError, match="must contain inputs and targets"):
        clients_from_files([path])
    np.savez(path, test_inputs=np.zeros(3), **arrays())
    with pytest.raises(InvalidValueError, match="must contain inputs and targets"):
        clients_from_files([path])
    tensors = tmp_path / "a.safetensors"
    tensors.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        clients_from_files([tensors])


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", arrays(20, 3))
    save(tmp_path / "b.npz", arrays(20, 4))
    with pytest.raises(InvalidValueError, match=r"b.npz.*must be of shape \(3,\)"):
        clients_from_files(tmp_path)
    save(tmp_path / "b.npz", {"inputs": np.zeros((9, 3), np.uint8), "targets": np.arange(9)})
    with pytest.raises(InvalidValueError, match="must be float32"):
        clients_from_files(tmp_path)


@pytest.mark.parametrize("files", [[], "nowhere", ["nowhere.npz"], ["a.txt"]])
def test_no_such_files(tmp_path: Path, files: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InvalidValueError) as caught:
        clients_from_files(files)
    assert caught.value.field == "files"


def test_arrays() -> None:
    data = dataset_from_arrays(np.arange(60.0).reshape(20, 3), [0, 1, 2, 3] * 5)
    assert data.train.inputs.dtype == np.float32
    assert data.n_classes == 4
    assert len(split_dataset(data, 4)) == 4
    images = np.zeros((8, 1, 2, 2), np.uint8)
    own = dataset_from_arrays(
        images, np.arange(8) % 2, test_inputs=images[:4], test_targets=[0, 1, 0, 1], n_classes=5
    )
    assert own.train.inputs.dtype == np.uint8
    assert (own.n_classes, own.deal_test) == (5, True)
    assert [len(c.test) for c in split_dataset(own, 2)] == [2, 2]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"inputs": [["a"]], "targets": [0]}, "inputs"),
        ({"inputs": [[np.nan]], "targets": [0]}, "inputs, record 0"),
        ({"inputs": [[1e300]], "targets": [0]}, "inputs, record 0"),
        ({"inputs": [[1.0]], "targets": [0.5]}, "targets"),
        ({"inputs": [[1.0]], "targets": [-1]}, "targets, record 0"),
        ({"inputs": [[1.0]], "targets": [0, 1]}, "targets"),
        ({"inputs": np.zeros((0, 2)), "targets": np.zeros(0, int)}, "targets"),
        ({"inputs": [[1.0]], "targets": [0], "test_inputs": [[1.0]]}, "test_targets"),
        (
            {"inputs": [[1.0]], "targets": [0], "test_inputs": [[1.0, 2.0]], "test_targets": [0]},
            "test_inputs",
        ),
        ({"inputs": [[1.0]], "targets": [3], "n_classes": 2}, "targets, record 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_bad_arrays(options: dict, field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        dataset_from_arrays(**options)
    assert caught.value.field == field


def test_torch_datasets() -> None:
    x, y = torch.randn(30, 3), torch.arange(30) % 3
    whole = dataset_from_torch(TensorDataset(x, y), test=TensorDataset(x[:6], y[:6]))
    np.testing.assert_array_equal(whole.train.inputs, x.numpy())
    assert whole.test is not None
    assert len(whole.test) == 6
    datasets = [TensorDataset(x[:10], y[:10]), TensorDataset(x[10:], y[10:])]
    clients = clients_from_torch(datasets)
    assert [(len(c.train), len(c.test)) for c in clients] == [(8, 2), (16, 4)]
    given = clients_from_torch(datasets, tests=datasets)
    assert [(len(c.train), len(c.test)) for c in given] == [(10, 10), (20, 20)]
    pairs = [(np.zeros(2), 0), (np.ones(2), 1)]  # any sequence of pairs will do
    assert len(clients_from_torch([pairs])[0].train) == 1


@pytest.mark.parametrize(
    "datasets",
    [[], [[(np.zeros(2), 0), (np.zeros(3), 1)]], [[1, 2]], [[]], [[(np.zeros(2), "a")]]],
)
def test_bad_torch_datasets(datasets: list) -> None:
    with pytest.raises(InvalidValueError):
        clients_from_torch(datasets)
    with pytest.raises(InvalidValueError, match="tests"):
        clients_from_torch(datasets, tests=[[]] * 7)


def test_data_imports_no_large_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, noisewise.data; sys.exit(bool({'torch', 'sklearn', 'PIL'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
