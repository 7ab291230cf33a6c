"""Samples of the coordinates, and the paper's sub-matrices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from matrices import planted

from noisewise.errors import InvalidValueError
from noisewise.noise.blocks import RowSource
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.pcp_estimator import PCP, principal_component_pursuit
from noisewise.noise.sampling import draw_rows, sample_index, submatrices


class Source:
    """A matrix that is read by rows and counts the rows that were read."""

    def __init__(self, M: np.ndarray) -> None:
        self.M, self.read = M, 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.M.shape

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        for start in range(0, len(self.M), rows):
            self.read += len(self.M[start : start + rows])
            yield self.M[start : start + rows]

    def take(self, index: np.ndarray) -> np.ndarray:
        self.read += len(index)
        return self.M[index]


@pytest.mark.parametrize(("p", "count"), [(10, 10), (10, 3), (1000, 400), (10**6, 5000), (50, 49)])
def test_sample_is_sorted_distinct_and_in_range(p: int, count: int) -> None:
    index = sample_index(p, count, seed=1)
    assert len(index) == count
    assert np.all(np.diff(index) > 0)
    assert index[0] >= 0
    assert index[-1] < p


def test_sample_is_of_the_whole_model() -> None:
    index = sample_index(10**6, 32_000, seed=1)
    share = np.histogram(index, bins=10, range=(0, 10**6))[0] / 32_000
    assert share == pytest.approx(np.full(10, 0.1), abs=0.005)
    # Power: the first rows, as the paper takes them, fail this.
    first = np.histogram(np.arange(32_000), bins=10, range=(0, 10**6))[0] / 32_000
    assert np.max(np.abs(first - 0.1)) > 0.5


def test_seed_decides() -> None:
    assert np.array_equal(sample_index(10**5, 500, 3), sample_index(10**5, 500, 3))
    assert not np.array_equal(sample_index(10**5, 500, 3), sample_index(10**5, 500, 4))


def test_error_of_a_sample_is_as_promised() -> None:
    case = planted(100_000, 4, rank=0)
    ratio = [
        Norm(sample=1000, seed=seed).estimate(case.updates).variance / case.variance
        for seed in range(100)
    ]
    assert np.std(ratio) == pytest.approx(np.sqrt(2 / 1000), rel=0.15)
    assert np.mean(ratio) == pytest.approx(1.0, abs=0.01)


def test_auto_reads_all_while_it_is_cheap() -> None:
    M = planted(30_000, 4).updates
    assert draw_rows(M, "auto", 0, budget=10**9, one_pass=True).values is M
    few = draw_rows(M, "auto", 0, budget=200_000, one_pass=True)
    assert few.values.shape == (12_500, 4)
    assert few.total == 30_000
    assert few.scale(12_500) == pytest.approx(2.4)
    assert draw_rows(M, "auto", 0, budget=1, one_pass=True).values.shape == (10_000, 4)
    capped = draw_rows(M, "auto", 0, budget=10**9, one_pass=True, most=11_000)
    assert capped.values.shape == (11_000, 4)
    assert draw_rows(M, None, 0, budget=10**9, one_pass=True, most=11_000).values is M


def test_same_rows_from_memory_torch_and_source() -> None:
    M = planted(5000, 3).updates
    expected = draw_rows(M, 200, 7, budget=1, one_pass=False)
    source = Source(M)
    assert isinstance(source, RowSource)
    for updates in (torch.from_numpy(M), source):
        drawn = draw_rows(updates, 200, 7, budget=1, one_pass=False)
        assert np.array_equal(np.asarray(drawn.values), expected.values)
        assert drawn.total == 5000
    assert source.read == 200


def test_sample_of_an_iterator_of_unknown_length() -> None:
    M = np.arange(20_000, dtype=float)[:, None] * np.ones(2)
    blocks = (M[i : i + 777] for i in range(0, len(M), 777))
    drawn = draw_rows(blocks, 1000, 0, budget=1, one_pass=False)
    rows = np.asarray(drawn.values)[:, 0]
    assert drawn.total == 20_000
    assert len(np.unique(rows)) == 1000
    assert np.all(np.diff(rows) > 0)
    share = np.histogram(rows, bins=4, range=(0, 20_000))[0] / 1000
    assert share == pytest.approx(np.full(4, 0.25), abs=0.05)


def test_submatrices_of_the_paper() -> None:
    assert submatrices(10, 3, None) == [slice(0, 3), slice(3, 6), slice(7, 10)]
    assert submatrices(10, 3, 1) == [slice(0, 3)]
    assert submatrices(100, 10, 2) == [slice(0, 10), slice(50, 60)]
    assert submatrices(10, 10, None) == [slice(0, 10)]
    assert submatrices(10, 25, None) == [slice(0, 10)]
    assert submatrices(10, 6, None) == [slice(0, 6)]


def test_pcp_on_submatrices_is_the_scaled_mean() -> None:
    M = planted(1000, 5).updates
    by_hand = np.mean(
        [
            principal_component_pursuit(M[s]).energy * 1000 / 300
            for s in submatrices(1000, 300, None)
        ],
        axis=0,
    )
    source = Source(M)
    for updates in (M, torch.from_numpy(M), source):
        got = PCP(submatrix_rows=300).estimate(updates)
        assert got.variance == pytest.approx(by_hand, rel=1e-6)
        assert got.details["rows"] == 900
    assert source.read == 900
    first = PCP(submatrix_rows=300, submatrices=1).estimate(M)
    assert first.variance == pytest.approx(
        principal_component_pursuit(M[:300]).energy * 1000 / 300, rel=1e-6
    )


def test_bad_options_are_named() -> None:
    for field, options in [
        ("sample", {"sample": -3}),
        ("submatrix_rows", {"submatrix_rows": 0}),
        ("submatrices", {"submatrices": 2}),
        ("submatrices", {"submatrix_rows": 5, "submatrices": 0}),
    ]:
        with pytest.raises(InvalidValueError, match=field):
            PCP(**options)
