"""The factor model: its likelihood compared with a general optimiser, its limits, quiet rows."""

from __future__ import annotations

import numpy as np
import pytest
from matrices import planted
from scipy.optimize import minimize

from noisewise.errors import InvalidValueError
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.factor_model import (
    choose_rank,
    fit_factors,
    identifiable_rank,
    signal_loadings,
)
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.quiet_rows import chunk_grams
from noisewise.noise.variance import excess_noise


def moments(n: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S = B B^T + diag(psi) exactly, with B and psi."""
    rng = np.random.default_rng(seed)
    B, psi = rng.normal(size=(n, rank)), np.geomspace(0.2, 5, n)[rng.permutation(n)]
    return B @ B.T + np.diag(psi), B, psi


def sample(S: np.ndarray, rows: int, seed: int = 1) -> np.ndarray:
    M = np.random.default_rng(seed).normal(size=(rows, len(S))) @ np.linalg.cholesky(S).T
    return M.T @ M / rows


def deviance(S: np.ndarray, B: np.ndarray, psi: np.ndarray) -> float:
    """Compute log|Sigma| + tr(S Sigma^-1) - log|S| - n directly."""
    sigma = B @ B.T + np.diag(psi)
    _, logdet = np.linalg.slogdet(sigma)
    return float(logdet + np.trace(S @ np.linalg.inv(sigma)) - np.linalg.slogdet(S)[1] - len(S))


def general_optimiser(S: np.ndarray, rank: int, B: np.ndarray, psi: np.ndarray) -> float:
    """The slow reference: all of B and log psi by L-BFGS with numerical gradients."""
    n = len(S)

    def value(x: np.ndarray) -> float:
        return deviance(S, x[: n * rank].reshape(n, rank), np.exp(x[n * rank :]))

    start = np.concatenate([B.ravel(), np.log(psi)])
    found = minimize(value, start, method="L-BFGS-B", options={"maxiter": 3000, "maxfun": 10**6})
    return float(found.fun)


def inverse(variance: np.ndarray) -> np.ndarray:
    return (1 / variance) / np.sum(1 / variance)


class TestLikelihood:
    def test_exact_moments_are_recovered(self) -> None:
        S, _, psi = moments(9, 2)
        fit = fit_factors(S, 1000, 2)
        assert fit.converged
        assert fit.deviance == pytest.approx(0, abs=1e-8)
        assert fit.noise == pytest.approx(psi, rel=1e-5)

    def test_optimum_against_general_optimiser(self) -> None:
        S, B, psi = moments(6, 1)
        S = sample(S, 200)
        rows = 200
        fit = fit_factors(S, rows, 1)
        slow = general_optimiser(S, 1, B, psi)
        assert fit.deviance / rows == pytest.approx(slow, abs=2e-6)
        # Power: another psi is worse by far more than that.
        loadings = signal_loadings(S, fit.noise * 1.1, rows)[:, :1]
        assert deviance(S, loadings, fit.noise * 1.1) > slow + 1e-3

    def test_relative_error_is_the_spread(self) -> None:
        S, _, _ = moments(8, 1, seed=3)
        fits = [fit_factors(sample(S, 500, seed), 500, 1) for seed in range(200)]
        spread = np.std([np.log(fit.noise) for fit in fits], axis=0)
        claimed = np.mean([fit.relative_error for fit in fits], axis=0)
        assert claimed == pytest.approx(spread, rel=0.2)
        assert np.any(np.abs(0.8 * claimed / spread - 1) > 0.2)  # power

    def test_scaling_and_permuting_columns(self) -> None:
        S, _, _ = moments(10, 2)
        S = sample(S, 3000)
        fit = choose_rank(S, 3000)
        factors, order = np.geomspace(1e-6, 1e6, 10), np.array([4, 2, 6, 9, 0, 1, 5, 3, 8, 7])
        scaled = choose_rank(S * np.outer(factors, factors), 3000)
        assert scaled.rank == fit.rank == 2
        assert scaled.noise == pytest.approx(fit.noise * factors**2, rel=1e-6)
        permuted = choose_rank(S[np.ix_(order, order)], 3000)
        assert permuted.noise == pytest.approx(fit.noise[order], rel=1e-6)

    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_finds_the_rank(self, rank: int) -> None:
        S, _, psi = moments(14, rank, seed=2)
        fit = choose_rank(sample(S, 4000), 4000)
        assert fit.rank == rank
        assert fit.noise == pytest.approx(psi, rel=0.2)

    @pytest.mark.parametrize(("n", "rank"), [(1, 0), (2, 0), (3, 1), (4, 1), (6, 3), (20, 14)])
    def test_bound_of_identifiability(self, n: int, rank: int) -> None:
        assert identifiable_rank(n) == rank

    def test_improper_solutions_are_refused(self) -> None:
        # Two clients share a factor that no other client has: their psi are not determined.
        S = np.diag([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        S[0, 1] = S[1, 0] = 0.6
        fit = fit_factors(S, 10_000, 1)
        assert not fit.determined
        chosen = choose_rank(S, 10_000)
        assert chosen.determined
        assert chosen.rank == 0

    def test_start_changes_the_way_not_the_end(self) -> None:
        S = sample(moments(10, 2)[0], 2000)
        cold, warm = choose_rank(S, 2000), choose_rank(S, 2000, start=np.diagonal(S) * 0.3)
        assert warm.rank == cold.rank
        assert warm.noise == pytest.approx(cold.noise, rel=1e-5)

    def test_loadings_are_the_signal(self) -> None:
        S, B, psi = moments(12, 1)
        found = signal_loadings(S, psi, 10_000)
        assert found.shape == (12, 1)
        assert found[:, 0] == pytest.approx(B[:, 0] * np.sign(B[:, 0].sum()), rel=1e-6)
        assert signal_loadings(np.diag(psi), psi, 10_000).shape == (12, 0)


def own_signals(p: int, n: int, quiet_share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """In some rows, every client has its own signal, which a Gram matrix cannot tell from noise.

    Loud rows come in stretches of 200, as layers and filters do.
    """
    rng = np.random.default_rng(seed)
    variance = np.geomspace(1, 30, n)[rng.permutation(n)]
    noise = rng.normal(size=(p, n)) * np.sqrt(variance / p)
    loud = np.repeat(rng.random(-(-p // 200)) > quiet_share, 200)[:p]
    strength = np.sqrt(rng.uniform(0.2, 2.0, n) * np.median(variance) / p)
    return (noise + rng.normal(size=(p, n)) * strength * loud[:, None]), variance


class TestQuietRows:
    def test_they_show_noise_that_the_gram_matrix_hides(self) -> None:
        updates, variance = own_signals(30_000, 12, quiet_share=0.6)
        whole = Factor(quiet=False).estimate(updates)
        quiet = Factor().estimate(updates)
        assert excess_noise(inverse(whole.variance), variance) > 1.1
        assert excess_noise(inverse(quiet.variance), variance) < 1.003
        assert quiet.details["share"] < 1

    def test_choice_does_not_bias_the_level(self) -> None:
        updates, variance = own_signals(60_000, 6, quiet_share=0.6, seed=5)
        grams = chunk_grams(updates)
        psi = variance / 60_000
        gram, rows = grams.quiet(psi, 0.25)
        assert rows == pytest.approx(15_000, rel=0.02)
        level = np.diagonal(gram) / rows / psi
        assert np.mean(level) == pytest.approx(1.0, abs=0.01)
        # Power: a half chunk that is chosen by its own energy has noise that is too small.
        energy = np.einsum("khii->khi", grams.halves) @ (1 / psi)
        own = grams.halves[energy <= np.quantile(energy, 0.25)].sum(axis=0)
        biased = np.diagonal(own) / (np.sum(energy <= np.quantile(energy, 0.25)) * 16) / psi
        assert np.mean(biased) < 0.97

    def test_without_structure_all_rows_count(self) -> None:
        case = planted(20_000, 10, rank=0)
        assert Factor().estimate(case.updates).details["share"] == 1
        updates, _ = own_signals(30_000, 12, quiet_share=0.6)
        shuffled = updates[np.random.default_rng(0).permutation(len(updates))]
        assert Factor().estimate(shuffled).details["share"] == 1

    def test_chunks_sum_up_to_the_gram_matrix(self) -> None:
        M = planted(5003, 4).updates
        grams = chunk_grams(M)
        exact = M.astype(float).T @ M.astype(float)
        assert grams.rows == 5003
        assert grams.halves.shape == (5003 // 32, 2, 4, 4)
        assert grams.total == pytest.approx(exact, rel=1e-5, abs=1e-5)
        even = M[:32:2].astype(float)
        assert grams.halves[0, 0] == pytest.approx(even.T @ even, rel=1e-5, abs=1e-6)

    def test_memory_is_bounded_by_longer_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        M = planted(40_000, 3).updates
        whole = chunk_grams(M)
        monkeypatch.setattr("noisewise.noise.quiet_rows._MEMORY", 1)  # 64 chunks at least
        blocks = (M[i : i + 999] for i in range(0, 40_000, 999))
        small = chunk_grams(blocks)
        assert len(small.halves) <= 64
        assert small.half_rows > whole.half_rows
        assert small.total == pytest.approx(whole.total, rel=1e-6)
        rows = small.half_rows
        first = M[: 2 * rows : 2].astype(float)
        assert small.halves[0, 0] == pytest.approx(first.T @ first, rel=1e-4, abs=1e-5)


class TestEstimator:
    def test_reaches_the_oracle_where_norms_do_not(self) -> None:
        case = planted(20_000, 12, rank=2, signal=1.5)
        factor = Factor().estimate(case.updates)
        assert excess_noise(inverse(factor.variance), case.variance) < 1.001
        norm = Norm().estimate(case.updates)
        assert excess_noise(inverse(norm.variance), case.variance) > 1.05
        assert np.median(factor.variance / case.variance) == pytest.approx(1, abs=0.02)

    def test_loadings_are_in_the_units_of_the_updates(self) -> None:
        rng = np.random.default_rng(0)
        p, n = 20_000, 10
        direction = rng.normal(size=p)
        direction /= np.linalg.norm(direction)
        strength = np.linspace(1, 3, n)
        M = np.outer(direction, strength) + rng.normal(size=(p, n)) / np.sqrt(p)
        found = Factor().estimate(M).details["loadings"]
        assert found.shape == (n, 1)
        assert found[:, 0] == pytest.approx(strength, rel=0.05)

    def test_duplicates_share_one_answer(self) -> None:
        case = planted(4000, 8, rank=1, signal=1.0)
        alone = Factor().estimate(case.updates)
        twice = Factor().estimate(case.updates[:, [0, 1, 2, 3, 4, 5, 6, 7, 2, 2]])
        assert twice.variance[:8] == pytest.approx(alone.variance, rel=1e-3)
        assert twice.variance[8:] == pytest.approx(alone.variance[[2, 2]], rel=1e-3)
        assert twice.details["rank"] == alone.details["rank"] == 1

    def test_constant_and_identical_columns(self) -> None:
        assert np.ptp(Factor().estimate(np.ones((300, 4))).variance) == 0
        column = np.random.default_rng(1).normal(size=(300, 1))
        same = Factor().estimate(np.repeat(column, 5, axis=1))
        assert same.variance == pytest.approx(np.full(5, np.sum(column**2)), rel=1e-6)

    def test_few_rows_fall_back_to_norms(self) -> None:
        M = np.random.default_rng(0).normal(size=(5, 9))
        estimate = Factor().estimate(M)
        assert estimate.variance == pytest.approx(np.sum(M**2, axis=0))
        assert estimate.details["rank"] == 0

    def test_start_of_an_earlier_round(self) -> None:
        case = planted(6000, 10, rank=2, signal=1.0)
        cold = Factor().estimate(case.updates)
        warm = Factor().estimate_from(case.updates, cold.variance)
        assert warm.variance == pytest.approx(cold.variance, rel=0.02)

    def test_bad_options_are_named(self) -> None:
        for field, options in [
            ("sample", {"sample": 0}),
            ("sample", {"sample": "most"}),
            ("seed", {"seed": -1}),
            ("max_rank", {"max_rank": -1}),
        ]:
            with pytest.raises(InvalidValueError, match=field):
                Factor(**options)
