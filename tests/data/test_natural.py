"""Natural federations: one client for each real client, and populations ordered by size."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from noisewise.data import (
    Dataset,
    Examples,
    dataset_from_arrays,
    load_dataset,
    make_specs,
    order_epsilons,
    split_dataset,
)
from noisewise.errors import InvalidValueError

SIZES = {"a": 50, "b": 3, "c": 200, "d": 1}


def federation(sizes: dict[str, int] = SIZES) -> Dataset:
    """Records with their own number as input, of three classes, in mixed order."""
    owners = [name for name, size in sizes.items() for _ in range(size)]
    order = np.random.default_rng(0).permutation(len(owners))
    inputs = np.arange(len(owners), dtype=np.float32)[:, None]
    targets = np.arange(len(owners)) % 3
    return dataset_from_arrays(inputs, targets, groups=[owners[i] for i in order])


def test_each_group_is_a_client_with_its_own_records(caplog: pytest.LogCaptureFixture) -> None:
    data = federation()
    assert data.groups is not None
    with caplog.at_level(logging.WARNING):
        clients = split_dataset(data, partition="natural")
    assert [client.name for client in clients] == ["a", "b", "c"]
    assert "left out 1 of 4 clients with fewer than 2 records (1 records in all): d" in caplog.text
    for number, client in enumerate(clients):
        records = np.concatenate([client.train.inputs, client.test.inputs])[:, 0].astype(int)
        assert sorted(records) == np.flatnonzero(data.groups == number).tolist()
    assert [(len(c.train), len(c.test)) for c in clients] == [(40, 10), (2, 1), (160, 40)]


def test_the_held_out_share_has_the_same_mix_of_labels() -> None:
    client = split_dataset(federation(), partition="natural", test_fraction=0.25)[2]
    mix = np.bincount(client.test.targets, minlength=3) / len(client.test)
    whole = np.concatenate([client.train.targets, client.test.targets])
    np.testing.assert_allclose(mix, np.bincount(whole, minlength=3) / len(whole), atol=0.021)


def test_small_clients_are_left_out_and_do_not_change_the_others() -> None:
    data = federation()
    loose = {c.name: c for c in split_dataset(data, partition="natural")}
    strict = {c.name: c for c in split_dataset(data, partition="natural", min_records=40)}
    assert list(strict) == ["a", "c"]
    for name, client in strict.items():
        np.testing.assert_array_equal(client.test.inputs, loose[name].test.inputs)
    other = split_dataset(data, partition="natural", seed=1)[2]
    assert not np.array_equal(other.test.inputs, loose["c"].test.inputs)
    with pytest.raises(InvalidValueError, match="min_records = 300: no client has more than 200"):
        split_dataset(data, partition="natural", min_records=300)


def test_ids_are_the_names_of_the_groups() -> None:
    clients = split_dataset(federation(), partition="natural")
    specs = make_specs(clients, epsilons=1.0, batch_sizes=1, delta=1e-3)
    assert [spec.id for spec in specs] == ["a", "b", "c"]
    others = split_dataset(federation(), 2)
    specs = make_specs(others, epsilons=1.0, batch_sizes=1, delta=1e-3)
    assert [spec.id for spec in specs] == ["client-00", "client-01"]


def test_wrong_options_are_named() -> None:
    data = federation()
    with pytest.raises(InvalidValueError, match=r"n_clients = 4: .* the 3 real clients of own"):
        split_dataset(data, 4, partition="natural")
    assert len(split_dataset(data, 3, partition="natural")) == 3
    with pytest.raises(InvalidValueError, match=r"alpha = 0.5: is not used by partition 'natural'"):
        split_dataset(data, partition="natural", alpha=0.5)
    with pytest.raises(InvalidValueError, match="min_records = 5: is not used by partition 'iid'"):
        split_dataset(data, 2, min_records=5)
    with pytest.raises(InvalidValueError, match="n_clients = None"):
        split_dataset(data)
    with pytest.raises(InvalidValueError, match="needs a dataset whose records belong to real"):
        split_dataset(load_dataset("digits"), partition="natural")
    with pytest.raises(InvalidValueError, match=r"must be one of iid, .*, natural"):
        split_dataset(data, 2, partition="natrual")


def test_groups_must_fit_the_records() -> None:
    train = Examples(np.zeros((3, 1), np.float32), np.zeros(3, np.int64))
    data = Dataset("d", train, None, 1, groups=np.array([0, 1, 0]), group_names=("x", "y"))
    for changes, words in [
        ({"groups": np.array([0, 1])}, r"groups = 'int64\[2\]'"),
        ({"groups": np.array([0, 1, 2])}, r"groups = \(0, 2\): must lie in 0..1"),
        ({"groups": np.array([0, -1, 0])}, "must lie in 0..1"),
        ({"groups": np.array([0.0, 1.0, 0.0])}, "must be int64"),
        ({"groups": None}, "need groups"),
        ({"group_names": ("x", "x")}, "group_names = 'x'"),
        ({"group_names": ("x", "y\n")}, "no control characters"),
        ({"group_names": ("x", "")}, "non-empty"),
    ]:
        with pytest.raises(InvalidValueError, match=words):
            replace(data, **changes)


def test_a_published_test_set_is_dealt_to_real_clients() -> None:
    owners = ["a"] * 40 + ["b"] * 80
    inputs = np.arange(120, dtype=np.float32)[:, None]
    data = dataset_from_arrays(
        inputs, np.arange(120) % 2, test_inputs=inputs[:30], test_targets=np.arange(30) % 2,
        groups=owners,
    )  # fmt: skip
    clients = split_dataset(data, partition="natural")
    assert [(c.name, len(c.train), len(c.test)) for c in clients] == [("a", 40, 10), ("b", 80, 20)]


def test_epsilons_follow_the_sizes() -> None:
    epsilons, sizes = [0.5, 3.0, 1.0, 2.0], [100, 7, 1000, 100]
    assert order_epsilons(epsilons, sizes, "small_strict") == (1.0, 0.5, 3.0, 2.0)
    assert order_epsilons(epsilons, sizes, "large_strict") == (1.0, 3.0, 0.5, 2.0)
    for order in ("small_strict", "large_strict"):
        assert sorted(order_epsilons(epsilons, sizes, order)) == sorted(epsilons)
    with pytest.raises(InvalidValueError, match="order = 'strict': must be one of small_strict"):
        order_epsilons(epsilons, sizes, "strict")
    with pytest.raises(InvalidValueError, match="3 values"):
        order_epsilons(epsilons[:3], sizes, "small_strict")
