"""Partitions of a dataset among clients: complete, disjoint, reproducible, with the wanted skew."""

from __future__ import annotations

import numpy as np
import pytest

from noisewise.data import (
    Dataset,
    Examples,
    load_dataset,
    partition_dirichlet,
    partition_iid,
    partition_quantity,
    partition_shards,
    split_dataset,
)
from noisewise.data.apportion import balance_rows, even_sizes, largest_remainder
from noisewise.errors import InvalidValueError

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def shuffled(counts: list[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


MNIST_LABELS = shuffled(MNIST_COUNTS)
SPLITS = {
    "iid": lambda labels, n, seed: partition_iid(labels, n, seed),
    "shards": lambda labels, n, seed: partition_shards(labels, n, 4, seed),
    "dirichlet": lambda labels, n, seed: partition_dirichlet(labels, n, 0.5, seed),
    "quantity": lambda labels, n, seed: partition_quantity(labels, n, 1.0, seed),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("n_clients", [1, 7, 20])
def test_clients_are_disjoint_and_cover_everything(name: str, n_clients: int) -> None:
    labels = shuffled([180] * 10)
    if name == "shards" and n_clients == 1:
        return  # one client cannot hold ten classes with a limit of four
    parts = SPLITS[name](labels, n_clients, 3)
    assert len(parts) == n_clients
    assert all(len(part) > 0 and part.dtype == np.int64 for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("name", SPLITS)
def test_the_seed_decides_and_nothing_else(name: str) -> None:
    labels = shuffled([180] * 10)
    first, global_state = SPLITS[name](labels, 10, 5), np.random.get_state()[1].copy()  # noqa: NPY002
    np.random.seed(99)  # noqa: NPY002
    again, other = SPLITS[name](labels, 10, 5), SPLITS[name](labels, 10, 6)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len(global_state) == 624


def test_iid_shares_are_equal_and_mixed() -> None:
    parts = partition_iid(MNIST_LABELS, 20, 0)
    assert {len(part) for part in parts} == {3000}
    expected = np.asarray(MNIST_COUNTS) / 60000
    for part in parts:
        shares = np.bincount(MNIST_LABELS[part], minlength=10) / 3000
        assert np.abs(shares - expected).max() < 0.03


@pytest.mark.parametrize(
    ("n_clients", "max_labels", "size"),
    [(20, 8, 3000), (40, 8, 1500), (60, 8, 1000), (20, 2, 3000), (100, 2, 600), (20, 10, 3000)],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shards_keep_the_limit_and_equal_sizes_on_mnist(
    n_clients: int, max_labels: int, size: int, seed: int
) -> None:
    parts = partition_shards(MNIST_LABELS, n_clients, max_labels, seed)
    assert {len(part) for part in parts} == {size}
    assert max(len(np.unique(MNIST_LABELS[part])) for part in parts) <= max_labels
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(60000))


def test_shards_are_cut_as_in_the_paper_where_classes_are_equal() -> None:
    """16 shards of 375 for each class: a client's share of a class is a multiple of 375."""
    labels = shuffled([6000] * 10)
    parts = partition_shards(labels, 20, 8, seed=1)
    table = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    assert set(np.unique(table % 375)) == {0}
    assert len({tuple(row) for row in table}) > 15  # clients differ


def test_shards_of_every_class_give_one_of_each() -> None:
    labels = shuffled([5000] * 10)
    parts = partition_shards(labels, 20, 10, seed=1)
    table = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    np.testing.assert_array_equal(table, np.full((20, 10), 250))


@pytest.mark.parametrize("seed", range(20))
def test_shards_on_uneven_small_data(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = shuffled(rng.integers(80, 120, size=6).tolist(), seed)
    n_clients, max_labels = int(rng.integers(8, 30)), int(rng.integers(3, 7))
    parts = partition_shards(labels, n_clients, max_labels, seed)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(len(np.unique(labels[part])) for part in parts) <= max_labels
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


def test_dirichlet_skew_grows_as_alpha_falls() -> None:
    def spread(alpha: float) -> float:
        parts = partition_dirichlet(MNIST_LABELS, 20, alpha, 0)
        shares = [np.bincount(MNIST_LABELS[p], minlength=10) / len(p) for p in parts]
        return float(np.mean([np.max(s) for s in shares]))

    assert spread(100.0) < 0.2 < spread(1.0) < spread(0.1)
    assert min(len(p) for p in partition_dirichlet(MNIST_LABELS, 20, 0.3, 0, min_size=50)) >= 50


def test_quantity_skew_changes_sizes_not_labels() -> None:
    parts = partition_quantity(MNIST_LABELS, 20, 0.5, 0)
    sizes = np.asarray([len(part) for part in parts])
    assert sizes.max() > 4 * np.median(sizes) / 2
    assert sizes.max() > 10 * sizes.min()
    largest = parts[int(sizes.argmax())]
    shares = np.bincount(MNIST_LABELS[largest], minlength=10) / len(largest)
    assert np.abs(shares - np.asarray(MNIST_COUNTS) / 60000).max() < 0.03


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: partition_iid([0, 1, 2], 4, 0), "n_clients"),
        (lambda: partition_iid([0, 1, 2], 0, 0), "n_clients"),
        (lambda: partition_iid([0, 1, 2], True, 0), "n_clients"),
        (lambda: partition_iid([], 1, 0), "labels"),
        (lambda: partition_iid([[0, 1]], 1, 0), "labels"),
        (lambda: partition_iid([0, 1, 2], 2, -1), "seed"),
        (lambda: partition_iid([0, 1, 2], 2, 0.5), "seed"),
        (lambda: partition_shards([0, 1, 2], 2, 0, 0), "max_labels"),
        (lambda: partition_shards(list(range(10)), 2, 2, 0), "max_labels"),
        (lambda: partition_shards([0] * 5 + [1] * 3, 2, 1, 0), "max_labels"),
        (lambda: partition_dirichlet([0] * 99, 3, 0, 0), "alpha"),
        (lambda: partition_dirichlet([0] * 99, 3, -1.0, 0), "alpha"),
        (lambda: partition_dirichlet([0] * 99, 3, float("nan"), 0), "alpha"),
        (lambda: partition_dirichlet([0] * 99, 3, 1e-300, 0), "alpha"),
        (lambda: partition_dirichlet([0, 1] * 60, 12, 0.001, 0), "alpha"),
        (lambda: partition_dirichlet([0] * 99, 10, 1.0, 0), "n_clients"),
        (lambda: partition_dirichlet([0] * 99, 3, 1.0, 0, min_size=0), "min_size"),
        (lambda: partition_quantity([0] * 99, 3, 0.0, 0), "alpha"),
        (lambda: partition_quantity([0] * 99, 9, 0.001, 0), "alpha"),
    ],
)
def test_impossible_partitions_name_the_field(call: object, field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.field == field


def numbered(labels: np.ndarray, test_labels: np.ndarray | None = None) -> Dataset:
    """A dataset whose inputs are the record numbers, so that a split can be traced."""
    train = Examples(np.arange(len(labels), dtype=np.float32)[:, None], labels)
    test = None
    if test_labels is not None:
        inputs = np.arange(len(test_labels), dtype=np.float32)[:, None] + 1e6
        test = Examples(inputs, test_labels)
    return Dataset("numbered", train, test, int(labels.max()) + 1, deal_test=test is not None)


OPTIONS = {
    "iid": {},
    "shards": {"max_labels": 4},
    "dirichlet": {"alpha": 0.5},
    "quantity": {"alpha": 1.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_split_keeps_every_record_once(name: str) -> None:
    labels = shuffled([180] * 10)
    clients = split_dataset(numbered(labels), 10, partition=name, seed=2, **OPTIONS[name])
    seen = np.concatenate([np.concatenate([c.train.inputs, c.test.inputs]) for c in clients])
    np.testing.assert_array_equal(np.sort(seen[:, 0]), np.arange(1800))
    for client in clients:
        total = len(client.train) + len(client.test)
        assert len(client.test) == max(round(total * 0.2), 1)
        for part in (client.train, client.test):  # targets travelled with their inputs
            np.testing.assert_array_equal(labels[part.inputs[:, 0].astype(int)], part.targets)


def test_split_of_mnist_is_the_papers() -> None:
    for n_clients, train, test in [(20, 2400, 600), (60, 800, 200)]:
        clients = split_dataset(
            numbered(MNIST_LABELS), n_clients, partition="shards", max_labels=8, seed=0
        )
        assert {(len(c.train), len(c.test)) for c in clients} == {(train, test)}


@pytest.mark.parametrize("name", OPTIONS)
def test_train_and_test_have_the_same_mix(name: str) -> None:
    clients = split_dataset(numbered(MNIST_LABELS), 20, partition=name, seed=1, **OPTIONS[name])
    for client in clients:
        train = np.bincount(client.train.targets, minlength=10)
        test = np.bincount(client.test.targets, minlength=10)
        expected = (train + test) * len(client.test) / (len(client.train) + len(client.test))
        assert np.abs(test - expected).max() < 1.0 + 1e-9


def test_published_test_set_is_dealt_like_the_train_set() -> None:
    labels, test_labels = shuffled([500] * 10), shuffled([100] * 10, 1)
    data = numbered(labels, test_labels)
    clients = split_dataset(data, 20, partition="shards", max_labels=3, seed=0)
    assert {(len(c.train), len(c.test)) for c in clients} == {(250, 50)}
    seen = np.concatenate([c.test.inputs[:, 0] for c in clients])
    np.testing.assert_array_equal(np.sort(seen), 1e6 + np.arange(1000))
    for client in clients:
        train = np.bincount(client.train.targets, minlength=10)
        np.testing.assert_allclose(
            np.bincount(client.test.targets, minlength=10), train / 5, atol=2
        )
    own = split_dataset(data, 20, test_fraction=0.5, seed=0)
    assert {(len(c.train), len(c.test)) for c in own} == {(125, 125)}


def test_a_function_serves_as_partition() -> None:
    def halves(labels: np.ndarray, n_clients: int, seed: int) -> list[np.ndarray]:
        return np.array_split(np.arange(len(labels)), n_clients)

    clients = split_dataset(load_dataset("digits"), 2, partition=halves)
    assert [len(c.train) + len(c.test) for c in clients] == [899, 898]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"n_clients": 0}, "n_clients"),
        ({"n_clients": 20}, "client 0"),  # a single record cannot be both train and test
        ({"n_clients": 21}, "n_clients"),
        ({"partition": "random"}, "partition"),
        ({"partition": lambda labels, n, seed: [np.arange(20), np.arange(0)]}, "partition"),
        ({"partition": "shards"}, "max_labels"),
        ({"partition": "dirichlet"}, "alpha"),
        ({"partition": "iid", "alpha": 1.0}, "alpha"),
        ({"partition": "dirichlet", "alpha": 1.0, "max_labels": 2}, "max_labels"),
        ({"test_fraction": 0.0}, "test_fraction"),
        ({"test_fraction": 1.0}, "test_fraction"),
    ],
)
def test_impossible_splits_name_the_field(arguments: dict, field: str) -> None:
    labels = shuffled([10, 10])
    with pytest.raises(InvalidValueError) as caught:
        split_dataset(numbered(labels), **{"n_clients": 2, **arguments})
    assert caught.value.field == field


def test_smallest_clients_keep_one_record_on_each_side() -> None:
    clients = split_dataset(numbered(shuffled([10, 10])), 10)
    assert {(len(c.train), len(c.test)) for c in clients} == {(1, 1)}


def test_dealing_a_tiny_test_set_is_refused() -> None:
    data = numbered(shuffled([10, 10]), shuffled([1, 1]))
    with pytest.raises(InvalidValueError, match="no test record"):
        split_dataset(data, 5)


def test_largest_remainder_sums_and_stays_close() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        shares, total = rng.random(int(rng.integers(1, 30))), int(rng.integers(0, 500))
        counts = largest_remainder(shares, total)
        assert counts.sum() == total
        assert np.abs(counts - shares / shares.sum() * total).max() < 1
    assert even_sizes(10, 4).tolist() == [3, 3, 2, 2]


def test_balance_rows_walks_a_chain_and_gives_up_when_there_is_none() -> None:
    # Client 0 has too much of class 0, client 2 lacks records of class 2: client 1 is the bridge
    # that only a chain of two steps uses.
    table = np.array([[6, 0, 0], [2, 2, 0], [0, 2, 0]])
    balanced = balance_rows(table, np.array([4, 4, 4]), max_labels=2)
    assert balanced is not None
    assert balanced.sum(axis=1).tolist() == [4, 4, 4]
    assert balanced.sum(axis=0).tolist() == table.sum(axis=0).tolist()
    assert balance_rows(np.array([[6, 0], [0, 4]]), np.array([5, 5]), max_labels=1) is None
