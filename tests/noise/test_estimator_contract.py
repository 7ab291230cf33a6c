"""Tests that every estimator in the table must pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matrices import planted

from noisewise.errors import UpdateError
from noisewise.noise.estimate import Estimator, WarmStart
from noisewise.noise.registry import ESTIMATORS, make_estimator
from noisewise.noise.reseeding import Reseedable


@pytest.mark.parametrize(
    "estimator", [make_estimator(name) for name in ESTIMATORS], ids=lambda e: e.name
)
class TestContract:
    M = planted(500, 6, signal=1.0).updates

    def test_is_an_estimator(self, estimator: Estimator) -> None:
        assert isinstance(estimator, Estimator)
        assert estimator.estimate(self.M).method == estimator.name

    def test_permutation(self, estimator: Estimator) -> None:
        order = [3, 0, 5, 1, 4, 2]
        got = estimator.estimate(self.M[:, order]).variance
        assert got == pytest.approx(estimator.estimate(self.M).variance[order], rel=1e-4)

    @pytest.mark.parametrize("factor", [1e-12, 1e-3, 1e10])
    def test_scaling(self, estimator: Estimator, factor: float) -> None:
        got = estimator.estimate(self.M * np.float32(factor)).variance
        assert got == pytest.approx(estimator.estimate(self.M).variance * factor**2, rel=1e-4)

    def test_input_not_mutated(self, estimator: Estimator) -> None:
        for dtype in (np.float32, np.float64):
            M = self.M.astype(dtype)
            estimator.estimate(M)
            assert np.array_equal(M, self.M.astype(dtype))

    def test_types_of_input(self, estimator: Estimator) -> None:
        expected = estimator.estimate(self.M).variance
        for M in (
            torch.from_numpy(self.M.copy()),
            torch.from_numpy(self.M.copy()).requires_grad_(),
            np.asfortranarray(self.M),
            self.M.astype(np.float64),
            np.repeat(self.M, 2, axis=1)[:, ::2],
        ):
            assert estimator.estimate(M).variance == pytest.approx(expected, rel=1e-4)
        assert estimator.estimate(self.M).variance.dtype == np.float64

    def test_zero_column(self, estimator: Estimator) -> None:
        M = self.M.copy()
        M[:, 2] = 0
        variance = estimator.estimate(M).variance
        assert variance[2] == 0
        assert np.all(np.delete(variance, 2) > 0)

    def test_all_zero(self, estimator: Estimator) -> None:
        assert np.array_equal(estimator.estimate(np.zeros((5, 3))).variance, np.zeros(3))

    def test_duplicate_columns_get_the_same(self, estimator: Estimator) -> None:
        M = self.M[:, [0, 1, 2, 0, 3]]
        variance = estimator.estimate(M).variance
        assert variance[0] == pytest.approx(variance[3], rel=1e-5)

    @pytest.mark.parametrize("shape", [(40, 1), (1, 1), (1, 5), (3, 8)])
    def test_small_shapes(self, estimator: Estimator, shape: tuple[int, int]) -> None:
        M = np.random.default_rng(0).normal(size=shape)
        variance = estimator.estimate(M).variance
        assert variance.shape == shape[1:]
        assert np.all(np.isfinite(variance))
        assert np.all(variance >= 0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_not_finite_names_the_column(self, estimator: Estimator, bad: float) -> None:
        M = self.M.copy()
        M[7, 4] = bad
        with pytest.raises(UpdateError, match=r"column\(s\) 4"):
            estimator.estimate(M)

    @pytest.mark.parametrize("M", [np.zeros(4), np.zeros((0, 3)), np.zeros((3, 0))])
    def test_not_a_matrix(self, estimator: Estimator, M: np.ndarray) -> None:
        with pytest.raises(UpdateError, match="shape"):
            estimator.estimate(M)

    @pytest.mark.parametrize("rows", [1, 7, 64, 10_000])
    def test_blocks_give_what_the_matrix_gives(self, estimator: Estimator, rows: int) -> None:
        blocks = (self.M[i : i + rows] for i in range(0, len(self.M), rows))
        got = estimator.estimate(blocks).variance
        assert got == pytest.approx(estimator.estimate(self.M).variance, rel=1e-5)

    def test_blocks_that_do_not_fit_are_named(self, estimator: Estimator) -> None:
        with pytest.raises(UpdateError, match="columns"):
            estimator.estimate([self.M[:5], self.M[5:, :3]])
        with pytest.raises(UpdateError, match="no rows"):
            estimator.estimate([])

    def test_read_only_memory(self, estimator: Estimator) -> None:
        frozen = self.M.copy()
        frozen.flags.writeable = False
        got = estimator.estimate(frozen).variance
        assert got == pytest.approx(estimator.estimate(self.M).variance, rel=1e-6)

    def test_another_seed_reads_other_rows(self, estimator: Estimator) -> None:
        sampled = make_estimator(estimator.name, sample=100)
        assert isinstance(sampled, Reseedable)
        first = sampled.estimate(self.M).variance
        assert np.array_equal(sampled.reseeded(0).estimate(self.M).variance, first)
        assert not np.array_equal(sampled.reseeded(1).estimate(self.M).variance, first)
        unforeseen = [sampled.reseeded(None).estimate(self.M).variance for _ in range(2)]
        assert not np.array_equal(*unforeseen)

    def test_sample_is_close_to_the_whole(self, estimator: Estimator) -> None:
        case = planted(60_000, 5, rank=0)
        few = make_estimator(estimator.name, sample=6000, seed=3).estimate(case.updates)
        all_rows = make_estimator(estimator.name, sample=None).estimate(case.updates)
        assert few.details["rows"] == 6000
        # A relative error of sqrt(2/6000) = 1.8%; PCP sees another share of the noise at other p.
        ratio = few.variance / all_rows.variance
        assert np.mean(ratio) == pytest.approx(1, abs=0.2 if estimator.name == "pcp" else 0.03)
        assert np.std(ratio) / np.mean(ratio) < 0.1
        swapped = few.variance[[1, 0, 2, 3, 4]] / all_rows.variance
        assert np.std(swapped) / np.mean(swapped) > 0.3


WARM = [name for name in ESTIMATORS if isinstance(make_estimator(name), WarmStart)]


def test_which_estimators_start_warm() -> None:
    assert WARM == ["factor"]


@pytest.mark.parametrize("name", WARM)
def test_a_warm_start_gives_what_a_cold_one_gives(name: str) -> None:
    """From the right energies and from wrong ones, which must not decide the estimate."""
    updates, estimator = planted(500, 6, signal=1.0).updates, make_estimator(name)
    assert isinstance(estimator, WarmStart)
    cold = estimator.estimate(updates).variance
    for start in (cold, 3 * cold[::-1]):
        given = start.copy()
        assert estimator.estimate_from(updates, given).variance == pytest.approx(cold, rel=0.02)
        assert np.array_equal(given, start)
