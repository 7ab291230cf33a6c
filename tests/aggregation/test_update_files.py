"""Update files: every format gives the same rows, also in blocks and with bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matrices import planted
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from noisewise.aggregation.update_files import open_updates, read_updates
from noisewise.errors import InvalidValueError
from noisewise.noise.blocks import RowSource, estimate_noise
from noisewise.noise.estimate import NoiseEstimate
from noisewise.noise.registry import ESTIMATORS, make_estimator

M = planted(2000, 5).updates


def write(kind: str, folder: Path, values: np.ndarray = M) -> Path | list[Path]:
    path = folder / f"updates.{kind.split('-')[0]}"
    if kind == "npz":
        np.savez(path, updates=values, other=np.arange(3))
    elif kind == "npz-compressed":
        np.savez_compressed(path, updates=values)
    elif kind in ("npz-fortran", "npz-compressed-fortran"):
        save = np.savez_compressed if "compressed" in kind else np.savez
        save(path, updates=np.asfortranarray(values))
    elif kind == "npy":
        np.save(path, values)
    elif kind == "safetensors":
        save_file({"updates": values, "other": np.arange(3.0)}, path)
    else:
        suffix = kind.split("-")[1]
        files = []
        for i, column in enumerate(values.T):
            files.append(folder / f"client{i}.{suffix}")
            if suffix == "npz":
                np.savez(files[-1], delta=column)
            elif suffix == "npy":
                np.save(files[-1], column)
            else:
                save_file({"delta": np.ascontiguousarray(column)}, files[-1])
        return files
    return path


KINDS = [
    "npz", "npz-compressed", "npz-fortran", "npz-compressed-fortran", "npy", "safetensors",
    "each-npz", "each-npy", "each-safetensors",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same(kind: str, tmp_path: Path) -> None:
    source = open_updates(write(kind, tmp_path))
    assert isinstance(source, RowSource)
    assert source.shape == M.shape
    for rows in (1, 7, 2000, 9999):
        assert np.array_equal(np.concatenate(list(source.blocks(rows))[:2000]), M)
    index = np.array([0, 1, 2, 10, 500, 501, 1999])
    assert np.array_equal(source.take(index), M[index])
    for name in ESTIMATORS:
        from_file = make_estimator(name).estimate(source).variance
        assert from_file == pytest.approx(make_estimator(name).estimate(M).variance, rel=1e-5)


class Own:
    """A user's own estimator, which accepts tensors only."""

    name = "own"

    def estimate(self, updates: torch.Tensor) -> NoiseEstimate:
        return NoiseEstimate(updates.double().square().sum(dim=0).numpy(), self.name)


def test_own_estimator_gets_a_tensor(tmp_path: Path) -> None:
    source = open_updates(write("each-npz", tmp_path))
    expected = np.sum(M.astype(float) ** 2, axis=0)
    assert estimate_noise(Own(), source).variance == pytest.approx(expected)


def test_read_updates_reads_all(tmp_path: Path) -> None:
    assert np.array_equal(read_updates(write("npz", tmp_path)).numpy(), M)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 1e-3), (torch.float64, 0)]
)
def test_other_floats(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    save_torch({"updates": torch.from_numpy(M).to(dtype)}, tmp_path / "a.safetensors")
    values = open_updates(tmp_path / "a.safetensors").take(np.arange(2000))
    assert values.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert np.array_equal(values, torch.from_numpy(M).to(dtype).to(torch.float64).numpy())


def test_big_endian_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", updates=M.astype(">f4"))
    assert np.array_equal(open_updates(tmp_path / "a.npz").take(np.arange(2000)), M)


def test_a_folder_is_one_file_for_each_client(tmp_path: Path) -> None:
    write("each-safetensors", tmp_path)
    (tmp_path / "notes.txt").write_text("not an update")
    source = open_updates(tmp_path)
    assert source.names == ("client0", "client1", "client2", "client3", "client4")
    assert np.array_equal(np.concatenate(list(source.blocks(64))), M)


def bad_files(folder: Path) -> dict[str, tuple[object, str]]:
    np.savez(folder / "name.npz", deltas=M)
    np.savez(folder / "vector.npz", updates=M[:, 0])
    np.savez(folder / "ints.npz", updates=np.ones((3, 2), dtype=int))
    np.savez(folder / "object.npz", updates=np.array([[{}]], dtype=object))
    (folder / "text.npz").write_text("hello")
    (folder / "text.safetensors").write_text("hello, this is not a header at all")
    save_file({"updates": M}, folder / "cut.safetensors")
    whole = (folder / "cut.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-4])
    np.save(folder / "short.npy", M[:5, 0])
    np.save(folder / "long.npy", M[:9, 0])
    np.savez(folder / "two.npz", a=M[:, 0], b=M[:, 1])
    (folder / "empty").mkdir()
    return {
        "name": (folder / "name.npz", "deltas"),
        "vector": (folder / "vector.npz", "p x n"),
        "ints": (folder / "ints.npz", "floating"),
        "object": (folder / "object.npz", "objects"),
        "text.npz": (folder / "text.npz", "read"),
        "text.safetensors": (folder / "text.safetensors", "header"),
        "cut": (folder / "cut.safetensors", "bytes"),
        "lengths": ([folder / "short.npy", folder / "long.npy"], "9 numbers"),
        "two arrays": ([folder / "two.npz", folder / "short.npy"], "a, b"),
        "empty": (folder / "empty", "safetensors"),
        "nowhere": (folder / "nowhere.npz", "nowhere"),
        "nothing": ([], "at least one"),
    }


def test_bad_files_are_named(tmp_path: Path) -> None:
    for what, (path, message) in bad_files(tmp_path).items():
        with pytest.raises(InvalidValueError) as caught:
            open_updates(path)
        assert message in str(caught.value), what


def test_truncated_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, M)
    source = open_updates(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidValueError, match="is truncated"):
        list(source.blocks(100))


SCRIPT = """
import resource, sys
from noisewise.aggregation.update_files import open_updates
from noisewise.noise.registry import make_estimator
small = open_updates(sys.argv[2])
for name in ("norm", "factor"):
    make_estimator(name).estimate(small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in ("norm", "factor"):
    make_estimator(name, sample=None).estimate(open_updates(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_stays_bounded(tmp_path: Path) -> None:
    big = np.lib.format.open_memmap(
        tmp_path / "big.npy", mode="w+", dtype=np.float32, shape=(2_000_000, 20)
    )  # 160 MB
    rng = np.random.default_rng(0)
    for start in range(0, len(big), 500_000):
        big[start : start + 500_000] = rng.standard_normal((500_000, 20), dtype=np.float32)
    del big
    np.save(tmp_path / "small.npy", M)
    words = [sys.executable, "-c", SCRIPT, tmp_path / "big.npy", tmp_path / "small.npy"]
    out = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 100, "MB beyond the small matrix"
