"""PFA: which clients are public, and the projection compared with an SVD."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from noisewise.aggregation import PFA, Disclosure, ServerView, UpdateMatrix
from noisewise.aggregation.pfa import public_clients
from noisewise.data import authors_population

PUBLIC = [False, True, False, True, False, True, True, False]
EPSILON = np.array([0.2, 3.0, 0.25, 3.3, 0.21, 2.8, 3.1, 0.23])


def aggregate(values: np.ndarray, epsilons: np.ndarray, dimension: int = 1) -> np.ndarray:
    ids = tuple(f"c{k}" for k in range(values.shape[1]))
    view = ServerView(
        UpdateMatrix(torch.from_numpy(values), ids), 1, {Disclosure.EPSILON: epsilons}
    )
    answer = PFA(dimension).aggregate(view, {})
    np.testing.assert_allclose(answer.weights, epsilons / epsilons.sum(), rtol=1e-12)
    return answer.delta.numpy()


def reference(
    values: np.ndarray, epsilons: np.ndarray, public: list[bool], dimension: int
) -> np.ndarray:
    """The definition, with a full SVD."""
    mask = np.array(public)
    seen = values[:, mask]
    mean = seen.mean(axis=1, keepdims=True) if mask.sum() > 1 else np.zeros((len(values), 1))
    U, s, _ = np.linalg.svd(seen - mean, full_matrices=False)
    V = U[:, : min(dimension, int((s > 1e-9 * s[0]).sum()))]
    combined = values.copy()
    combined[:, ~mask] = mean + V @ (V.T @ (values[:, ~mask] - mean))
    return combined @ (epsilons / epsilons.sum())


def updates(p: int = 60, n: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(p, n))


def check_projection(dimension: int, counted: int) -> None:
    got = aggregate(updates(), EPSILON, dimension)
    expected = reference(updates(), EPSILON, PUBLIC, counted)
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 50])
def test_projection(dimension: int) -> None:
    """Four public clients have at most three directions around their mean."""
    assert public_clients(EPSILON).tolist() == PUBLIC
    check_projection(dimension, dimension)


def test_another_dimension_or_a_plain_average_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_projection(1, 2)
    with pytest.raises(AssertionError):
        check_projection(2, 1)
    plain = updates() @ (EPSILON / EPSILON.sum())
    assert np.abs(aggregate(updates(), EPSILON) - plain).max() > 0.01


def test_projection_removes_noise() -> None:
    """The projection removes noise of private clients outside of the public directions."""
    signal = np.random.default_rng(1).normal(size=(2000, 1))
    noise = np.random.default_rng(2).normal(size=(2000, 8)) * np.where(PUBLIC, 0.1, 30.0)
    plain = (signal + noise) @ (EPSILON / EPSILON.sum())
    projected = aggregate(signal + noise, EPSILON)
    error = np.linalg.norm(projected - signal[:, 0]) / np.linalg.norm(plain - signal[:, 0])
    assert error < 0.3


def test_one_public_client() -> None:
    epsilons = np.array([0.2, 0.25, 0.21, 9.0, 0.23])
    public = [False, False, False, True, False]
    assert public_clients(epsilons).tolist() == public
    values = updates(n=5)
    got = aggregate(values, epsilons)
    np.testing.assert_allclose(got, reference(values, epsilons, public, 1), rtol=1e-8, atol=1e-10)
    # All of it lies on that client's own update.
    direction = values[:, 3] / np.linalg.norm(values[:, 3])
    np.testing.assert_allclose(got, direction * (direction @ got), atol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_equal_epsilons_make_everyone_public(n: int) -> None:
    epsilons = np.full(n, 0.5)
    assert public_clients(epsilons).all()
    np.testing.assert_allclose(aggregate(updates(n=n), epsilons), updates(n=n).mean(axis=1))


def test_two_clients() -> None:
    assert public_clients(np.array([1.0, 5.0])).tolist() == [False, True]
    assert public_clients(np.array([5.0, 1.0])).tolist() == [True, False]


def test_public_clients_without_spread_leave_their_mean() -> None:
    """With identical public updates, rounding errors do not count as a direction."""
    epsilons = np.array([0.2, 0.25, 0.21, 3.0, 3.1, 3.2])  # a mean of three is not exact
    values = updates(n=6)
    values[:, 3:] = values[:, [3]]
    got = aggregate(values, epsilons)
    np.testing.assert_allclose(got, values[:, 3], rtol=1e-9, atol=1e-12)


def test_public_updates_of_zero() -> None:
    values = updates()
    values[:, PUBLIC] = 0.0
    np.testing.assert_allclose(aggregate(values, EPSILON), np.zeros(60), atol=1e-12)
    epsilons = np.array([0.2, 0.25, 0.21, 9.0, 0.23])
    alone = updates(n=5)
    alone[:, 3] = 0.0
    np.testing.assert_allclose(aggregate(alone, epsilons), np.zeros(60), atol=1e-12)


def test_a_wide_upper_cluster_does_not_take_the_smallest_epsilon() -> None:
    """The mixture assigns values below a narrow cluster to the wide upper one."""
    epsilons = np.array([0.1, *[0.2] * 8, 0.4, 0.5, 0.6, 0.7, 1.0])
    assert public_clients(epsilons).tolist() == [False] * 9 + [True] * 5


def test_a_lucky_single_client_is_no_cluster_where_there_are_two() -> None:
    """In the authors' Dist6, a cluster of one client has the better likelihood."""
    epsilons = np.array(authors_population("Dist6", 20).epsilons)
    assert np.sort(epsilons[public_clients(epsilons)])[0] == 0.36
    assert public_clients(epsilons).sum() == 11


DRAWS = [(f"Dist{k}", n) for k in range(1, 10) for n in (20, 60)]


@pytest.mark.parametrize(("dist", "n"), DRAWS)
def test_clusters_of_the_authors_populations(dist: str, n: int) -> None:
    """The order of the clients does not matter, and no private epsilon is above a public one."""
    epsilons = np.array(authors_population(dist, n).epsilons)
    public = public_clients(epsilons)
    assert 0 < public.sum() < n
    assert epsilons[public].min() > epsilons[~public].max()
    order = np.random.default_rng(0).permutation(n)
    assert np.array_equal(public_clients(epsilons[order]), public[order])
    assert not public[np.argmin(epsilons)]
