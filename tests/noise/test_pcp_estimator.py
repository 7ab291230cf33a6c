"""Principal component pursuit: the optimum compared with a slow solver, and degenerate matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from matrices import planted
from numpy.typing import NDArray

from noisewise.errors import InvalidValueError
from noisewise.noise.pcp_estimator import PCP, principal_component_pursuit


@dataclass(frozen=True)
class Reference:
    objective: float
    energy: NDArray[np.float64]


def reference(M: np.ndarray, *, sign: float = 1.0, iterations: int = 1500) -> Reference:
    """The algorithm as printed by Candes et al.: a full SVD each time, float64, mu as given.

    ``sign`` = -1 is the wrong sign in the paper.
    """
    M = M.astype(np.float64)
    p, n = M.shape
    lam, mu = 1 / np.sqrt(max(p, n)), 0.1 * p * n / (4 * np.abs(M).sum())
    S, Y = np.zeros_like(M), np.zeros_like(M)
    for _ in range(iterations):
        u, s, vt = np.linalg.svd(M - S + sign * Y / mu, full_matrices=False)
        L = (u * np.maximum(s - 1 / mu, 0)) @ vt
        X = M - L + Y / mu
        S = np.sign(X) * np.maximum(np.abs(X) - lam / mu, 0)
        Y = Y + mu * (M - L - S)
    nuclear = np.linalg.svd(L, compute_uv=False).sum()
    return Reference(nuclear + lam * np.abs(M - L).sum(), np.sum(S**2, axis=0))


CASES = {
    "noise": planted(600, 8, rank=0),
    "signal": planted(900, 10, rank=2, signal=2.0),
    "wide": planted(6, 12, rank=1),
    "one": planted(300, 1, rank=1),
}


@pytest.mark.parametrize("case", CASES)
def test_optimum_against_reference(case: str) -> None:
    M = CASES[case].updates
    slow = reference(M)
    fast = principal_component_pursuit(M)
    assert fast.converged
    assert fast.residual <= 2e-6
    assert fast.objective == pytest.approx(slow.objective, rel=1e-4)
    # With one column the optimum is flat, and the only weight is 1 anyway.
    rel = 0.05 if case == "one" else 1e-3
    assert fast.energy == pytest.approx(slow.energy, rel=rel, abs=1e-6 * slow.energy.sum())


def test_coarse_start_leaves_the_optimum() -> None:
    case = planted(20_000, 6, signal=2.0)
    slow = reference(case.updates, iterations=400)
    fast = principal_component_pursuit(case.updates)
    assert fast.converged
    assert fast.objective == pytest.approx(slow.objective, rel=1e-4)
    assert fast.energy == pytest.approx(slow.energy, rel=2e-3)


def test_coarse_start_saves_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    case = planted(20_000, 12, rank=1, signal=0.2)
    coarse = principal_component_pursuit(case.updates)
    monkeypatch.setattr("noisewise.noise.pursuit._COARSE_ROWS", 10**9)
    cold = principal_component_pursuit(case.updates)
    assert coarse.iterations < 0.8 * cold.iterations
    assert coarse.energy == pytest.approx(cold.energy, rel=1e-3)


def test_reference_has_power() -> None:
    M = CASES["signal"].updates
    right = principal_component_pursuit(M)
    wrong = reference(M, sign=-1.0, iterations=300)
    assert abs(wrong.objective / right.objective - 1) > 1e-3 or np.any(
        np.abs(wrong.energy / right.energy - 1) > 0.01
    )
    early = principal_component_pursuit(M, max_iterations=10)
    assert not early.converged
    assert early.objective > right.objective * (1 + 1e-4)


def test_gap_is_a_certificate() -> None:
    M = CASES["signal"].updates
    best = reference(M).objective
    for iterations in (10, 30, 60, 100):
        result = principal_component_pursuit(M, max_iterations=iterations)
        assert result.objective >= best * (1 - 1e-6)
        assert result.objective * (1 - result.gap) <= best * (1 + 1e-6)


def test_parts_add_up() -> None:
    M = planted(4000, 40).updates  # above the size that is solved in float64
    result = principal_component_pursuit(M, keep_parts=True)
    L, S = result.low_rank, result.sparse
    assert isinstance(L, np.ndarray)
    assert isinstance(S, np.ndarray)
    assert L.dtype == np.float32
    assert np.linalg.norm(M - L - S) <= 2e-6 * np.linalg.norm(M)
    assert result.energy == pytest.approx(np.sum(S.astype(float) ** 2, axis=0), rel=1e-5)
    values = np.linalg.svd(L.astype(float), compute_uv=False)
    assert result.singular_values == pytest.approx(values, abs=1e-5 * values[0])
    assert result.rank == np.sum(values > 1e-5 * values[0]) < 40


def test_float32_finds_the_optimum_of_float64() -> None:
    M = planted(9000, 16, signal=2.0).updates
    single = principal_component_pursuit(M)
    double = principal_component_pursuit(M.astype(np.float64))
    assert single.objective == pytest.approx(double.objective, rel=1e-5)
    assert single.energy == pytest.approx(double.energy, rel=1e-4)


def test_ranks_clients_by_their_noise() -> None:
    case = planted(3000, 16, rank=1, signal=0.3)
    estimate = PCP().estimate(case.updates)
    ratio = estimate.variance / case.variance
    assert estimate.converged
    assert np.std(ratio) / np.mean(ratio) < 0.2
    swapped = estimate.variance[[1, 0, *range(2, 16)]] / case.variance
    assert np.std(swapped) / np.mean(swapped) > 0.2


def test_identical_columns_are_treated_alike() -> None:
    column = np.random.default_rng(3).normal(size=(200, 1))
    estimate = PCP().estimate(np.repeat(column, 5, axis=1))
    assert estimate.converged
    assert estimate.variance == pytest.approx(np.full(5, estimate.variance[0]), rel=1e-6)


def test_constant_columns_have_no_noise() -> None:
    for M in (np.ones((200, 5)), np.outer(np.ones(50), [1.0, 2.0, -3.0])):
        estimate = PCP().estimate(M)
        assert estimate.converged
        assert np.array_equal(estimate.variance, np.zeros(M.shape[1]))


def odd_matrix(kind: int, rng: np.random.Generator) -> np.ndarray:
    """Matrices that training does not produce: with little noise, spikes, tiny or wide."""
    p, n = (int(np.exp(rng.uniform(0, top))) for top in (6.5, 2.7))
    rank = int(rng.integers(0, max(1, min(p, n))))
    low = rng.normal(size=(p, rank)) @ rng.normal(size=(rank, n)) if rank else np.zeros((p, n))
    noise = rng.normal(size=(p, n)) * np.exp(rng.normal(0, 2, n))
    return [
        low + noise,
        low + 1e-3 * noise,
        low + 1e-6 * noise,
        low,
        rng.standard_cauchy(size=(p, n)),
        (low + noise) * (rng.random(size=(p, n)) < 0.1),
    ][kind]


@pytest.mark.parametrize("kind", range(6))
def test_odd_matrices_converge_too(kind: int) -> None:
    rng = np.random.default_rng(kind)
    for _ in range(12):
        M = odd_matrix(kind, rng)
        result = principal_component_pursuit(M)
        assert result.converged, (M.shape, result.residual, result.gap, result.iterations)
        assert np.all(np.isfinite(result.energy))


def test_stopping_early_is_said() -> None:
    estimate = PCP(max_iterations=3).estimate(planted(300, 5).updates)
    assert not estimate.converged
    assert "max_iterations" in estimate.details["reason"]


def test_bad_options_are_named() -> None:
    with pytest.raises(InvalidValueError, match="tolerance"):
        principal_component_pursuit(np.ones((3, 2)), tolerance=0.0)
    with pytest.raises(InvalidValueError, match="max_iterations"):
        principal_component_pursuit(np.ones((3, 2)), max_iterations=0)
