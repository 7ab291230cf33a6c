"""Populations: sampled epsilons follow their distributions; the authors' draws; client specs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from noisewise.data import (
    authors_population,
    load_dataset,
    make_specs,
    sample_batch_sizes,
    sample_epsilons,
    split_dataset,
)
from noisewise.data.populations import DISTRIBUTIONS, NormalMixture
from noisewise.errors import InvalidValueError

CLIENTS = split_dataset(load_dataset("digits"), 12)


def law(dist: str):
    """The distribution function of a population, written apart from the sampler."""
    spec = DISTRIBUTIONS[dist]
    if isinstance(spec, NormalMixture):
        parts = list(zip(spec.weights, spec.means, spec.deviations, strict=True))
        return lambda x: sum(w * stats.norm.cdf(x, m, s) for w, m, s in parts)
    return lambda x: stats.uniform.cdf(x, spec.low, spec.high - spec.low)


@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_samplers_follow_their_law(dist: str) -> None:
    draws = np.asarray(sample_epsilons(dist, 20000, seed=1, minimum=1e-9))
    kept = draws[draws > 1e-9]  # Dist1 and Dist4 reach below 0, where the minimum steps in
    below = law(dist)(0.0)
    result = stats.kstest(kept, lambda x: (law(dist)(x) - below) / (1 - below))
    assert result.pvalue > 1e-3
    assert abs((draws <= 1e-9).mean() - below) < 0.01


def test_the_test_of_the_law_has_power() -> None:
    """The variance read as a standard deviation, or weights in the wrong order, are noticed."""
    draws = np.asarray(sample_epsilons("Dist8", 20000, seed=1, minimum=1e-9))
    wrong = NormalMixture((0.6, 0.4), (0.2, 0.5), (0.1, 0.1**0.5)).sample(
        20000, np.random.default_rng(0)
    )
    assert stats.kstest(wrong[wrong > 0], law("Dist8")).pvalue < 1e-6
    assert stats.kstest(0.7 - draws, law("Dist8")).pvalue < 1e-6


@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_authors_draws_come_from_the_laws(dist: str) -> None:
    """The second number of N(m, s) is the deviation: the 60 draws fit that, to two decimals."""
    draws = np.asarray(authors_population(dist, 60).epsilons)
    rng = np.random.default_rng(0)
    assert stats.kstest(draws + rng.uniform(-0.005, 0.005, 60), law(dist)).pvalue > 1e-3


def test_authors_draws_are_whole() -> None:
    for dist in DISTRIBUTIONS:
        for n in (20, 40, 60):
            draw = authors_population(dist, n)
            assert len(draw.epsilons) == len(draw.batch_sizes) == n
            assert draw.delta == 1e-4
            assert set(draw.batch_sizes) <= {16, 32, 64, 128}
    first = authors_population("Dist1", 20)
    assert first.epsilons[:3] == (2.81, 1.69, 1.74)
    assert first.batch_sizes[:4] == (32, 64, 16, 32)
    # The paper's "client 12 with epsilon .95" of Dist5.
    fifth = authors_population("Dist5", 20)
    assert [i for i, e in enumerate(fifth.epsilons) if e == 0.95] == [0, 10, 16]
    assert {fifth.batch_sizes[i] for i in (0, 10, 16)} == {32}
    assert authors_population("Dist1", 20, scale=10).epsilons[0] == pytest.approx(28.1)


def test_samples_are_positive_reproducible_and_independent() -> None:
    assert min(sample_epsilons("Dist1", 5000, seed=0)) == 0.15
    assert min(sample_epsilons("Dist1", 5000, seed=0, minimum=0.3, scale=10)) == 3.0
    assert sample_epsilons("Dist3", 9, 4) == sample_epsilons("Dist3", 9, 4)
    assert sample_epsilons("Dist3", 9, 4) != sample_epsilons("Dist3", 9, 5)
    sizes = sample_batch_sizes(4000, 4)
    assert sizes == sample_batch_sizes(4000, 4)
    assert all(abs(sizes.count(b) - 1000) < 120 for b in (16, 32, 64, 128))
    assert sample_batch_sizes(3, 0, choices=[20]) == (20, 20, 20)
    correlation = np.corrcoef(sizes, sample_epsilons("Dist3", 4000, 4))[0, 1]
    assert abs(correlation) < 6 / np.sqrt(4000)


def test_specs_take_one_value_or_one_for_each() -> None:
    specs = make_specs(
        CLIENTS,
        epsilons=np.linspace(1, 2, 12),
        batch_sizes=[16] * 12,
        delta=1e-4,
        local_epochs=np.int64(2),
    )
    assert [s.id for s in specs][:2] == ["client-00", "client-01"]
    assert specs[11].id == "client-11"
    assert [s.n_examples for s in specs] == [len(c.train) for c in CLIENTS]
    assert specs[11].epsilon == 2.0
    assert type(specs[0].epsilon) is float
    assert type(specs[0].local_epochs) is int
    many = make_specs(CLIENTS * 10, epsilons=1.0, batch_sizes=16, delta=1e-4)
    assert (many[0].id, many[119].id) == ("client-000", "client-119")
    own = make_specs(CLIENTS[:2], **GOOD, ids=["north", "south"])
    assert [s.id for s in own] == ["north", "south"]


GOOD = {"epsilons": 1.0, "batch_sizes": 16, "delta": 1e-4, "local_epochs": 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epsilons": [1.0] * 11}, "epsilons"),
        ({"ids": ["a"]}, "ids"),
        ({"ids": ["a"] * 12}, "ids"),
        ({"batch_sizes": [16] * 13}, "batch_sizes"),
        ({"delta": [1e-4]}, "delta"),
        ({"local_epochs": []}, "local_epochs"),
        ({"epsilons": [1.0] * 11 + [0.0]}, "client client-11: epsilon"),
        ({"epsilons": "0.5"}, "client client-00: epsilon"),
        ({"epsilons": float("inf")}, "client client-00: epsilon"),
        ({"batch_sizes": 1000}, "client client-00: batch_size"),
        ({"batch_sizes": 16.0}, "client client-00: batch_size"),
        ({"delta": 1.0}, "client client-00: delta"),
        ({"local_epochs": 0}, "client client-00: local_epochs"),
    ],
)
def test_bad_settings_name_the_field(change: dict, named: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        make_specs(CLIENTS, **{**GOOD, **change})
    assert caught.value.field == named


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: authors_population("Dist10", 20), "dist"),
        (lambda: authors_population("Dist1", 30), "n_clients"),
        (lambda: authors_population("Dist1", 20, scale=0), "scale"),
        (lambda: sample_epsilons("dist1", 20, 0), "dist"),
        (lambda: sample_epsilons("Dist1", 0, 0), "n_clients"),
        (lambda: sample_epsilons("Dist1", 5, 0, minimum=0), "minimum"),
        (lambda: sample_batch_sizes(5, 0, choices=[]), "choices"),
        (lambda: sample_batch_sizes(5, 0, choices=[16, 0]), "choices"),
        (lambda: sample_batch_sizes(0, 0), "n_clients"),
        (lambda: make_specs([], **GOOD), "number of clients"),
    ],
)
def test_bad_populations_name_the_field(call: object, field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.field == field
