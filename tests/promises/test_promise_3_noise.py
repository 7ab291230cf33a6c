"""Guarantee 3 of docs/privacy.md: noise has the right size and law, is fresh and secret."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dpsgd import (
    RecordingRandom,
    Update,
    flawed_update,
    make_test_plan,
    product_loss,
    seeded,
    zero_gradient_case,
)
from scipy import stats

from noisewise.errors import InvalidValueError
from noisewise.randomness import RandomSource, SecureRandom, SeededRandom
from noisewise.training import local_update
from noisewise.training.local import noise_grid

P = 30_000
LIMIT = 6 / P**0.5  # of a correlation
STEPS, BATCH, CLIP, Z, RATE = 6, 10, 1.7, 0.9, 0.3
DEVIATION = STEPS**0.5 * RATE * CLIP * Z / BATCH

Source = Callable[[int, int, str], RandomSource]


def secure(seed: int, round_number: int, client: str) -> RandomSource:
    """What a deployed client uses: neither seed nor round nor name play a part."""
    return SecureRandom()


# Nobody can seed the second one: all limits are so wide that chance fails them once in a million.
SOURCES: dict[str, Source] = {"seeded": SeededRandom, "secure": secure}


def noise_of(update: Update, rng: RandomSource) -> np.ndarray:
    """An update of records without gradients is its noise."""
    model, theta, data = zero_gradient_case(P, 20)
    plan = make_test_plan(n=20, batch=BATCH, steps=STEPS, clip=CLIP, z=Z)
    return update(model, theta, data, plan, RATE, product_loss, rng).delta.double().numpy()


def correlation(one: np.ndarray, two: np.ndarray) -> float:
    return abs(float(np.corrcoef(one, two)[0, 1]))


def check_size_and_law(update: Update, rng: RandomSource) -> None:
    noise = noise_of(update, rng)
    assert noise.var() == pytest.approx(DEVIATION**2, rel=0.04), "variance"
    assert abs(noise.mean()) < 6 * DEVIATION / P**0.5
    assert stats.kstest(noise / DEVIATION, "norm").pvalue > 1e-7, "law"
    # No coordinate follows another one, nor one half the other.
    assert correlation(noise[1:], noise[:-1]) < LIMIT
    assert correlation(noise[: P // 2], noise[P // 2 :]) < LIMIT * 2**0.5


def check_fresh(update: Update, source: Source) -> None:
    """Steps, rounds, clients and seeds have noise of their own."""
    updates = [
        noise_of(update, source(seed, round_number, client))
        for seed, round_number, client in [
            (0, 1, "a"), (0, 2, "a"), (0, 1, "b"), (1, 1, "a"), (0, 11, "a"), (0, 1, "1a"),
        ]
    ]  # fmt: skip
    for i, one in enumerate(updates):
        for two in updates[:i]:
            assert correlation(one, two) < LIMIT, "noise comes back"
    rng = RecordingRandom(source(0, 1, "a"))
    noise_of(update, rng)
    assert len(rng.noises) == STEPS
    for i, one in enumerate(rng.noises):
        for two in rng.noises[:i]:
            assert correlation(one, two) < LIMIT, "noise comes back"


@pytest.mark.parametrize("name", SOURCES)
def test_size_and_law(name: str) -> None:
    check_size_and_law(local_update, SOURCES[name](0, 1, "a"))


@pytest.mark.parametrize("name", SOURCES)
def test_fresh(name: str) -> None:
    check_fresh(local_update, SOURCES[name])


def test_noise_comes_on_top_of_gradients() -> None:
    """With gradients, the update minus the same update without noise is the noise."""
    torch.manual_seed(0)
    p = 3000
    model, theta, data = zero_gradient_case(p, 20)
    data.inputs.normal_()
    quiet, loud = make_test_plan(n=20, steps=3, z=1e-9), make_test_plan(n=20, steps=3, z=2.0)
    one, two = (
        local_update(model, theta, data, plan, RATE, product_loss, seeded()).delta.double()
        for plan in (loud, quiet)
    )
    assert float(two.norm()) > 0.1  # three steps of clipped gradients
    expected = 3 * (RATE * 2.0 / 10) ** 2
    assert float((one - two).var()) == pytest.approx(expected, rel=0.12)


def test_the_same_key_gives_the_same_noise() -> None:
    """The simulator's other half of the promise: a repetition is no second release."""
    assert np.array_equal(noise_of(local_update, seeded()), noise_of(local_update, seeded()))


# ---------------------------------------------------------------- planted flaws


@pytest.mark.parametrize("flaw", ["noise x 0.8", "noise reused"])
def test_planted_size_is_seen(flaw: str) -> None:
    check_size_and_law(flawed_update(None), seeded())
    with pytest.raises(AssertionError, match="variance"):
        check_size_and_law(flawed_update(flaw), seeded())


def test_planted_reuse_is_seen() -> None:
    check_fresh(flawed_update(None), SeededRandom)
    with pytest.raises(AssertionError, match="noise comes back"):
        check_fresh(flawed_update("noise reused"), SeededRandom)


@dataclass(frozen=True)
class Forgetful(SeededRandom):
    """Leaves one part of the key out."""

    forgets: str = ""

    def normal(self, step: int, size: int) -> np.ndarray:
        parts = {"seed": self.seed, "round": self.round, "client": self.client, "step": step}
        parts[self.forgets] = type(parts[self.forgets])()
        key = SeededRandom(int(parts["seed"]), int(parts["round"]), str(parts["client"]))
        return key.normal(int(parts["step"]), size)


@pytest.mark.parametrize("part", ["seed", "round", "client", "step"])
def test_planted_forgotten_key_is_seen(part: str) -> None:
    with pytest.raises(AssertionError, match="noise comes back"):
        check_fresh(local_update, lambda *key: Forgetful(*key, forgets=part))


@dataclass(frozen=True)
class Laplace(SeededRandom):
    """The right variance, the wrong law."""

    def normal(self, step: int, size: int) -> np.ndarray:
        # One step has all the variance, lest the sum of several look normal.
        draws = np.random.default_rng(step).laplace(scale=(STEPS / 2) ** 0.5, size=size)
        return draws if step == 0 else 0.0 * draws


def test_planted_law_is_seen() -> None:
    with pytest.raises(AssertionError, match="law"):
        check_size_and_law(local_update, Laplace(0, 1, "a"))


# ---------------------------------------------------------------- the deployed source


def check_secure_source(make: Callable[[], RandomSource]) -> None:
    """Laws of the normals and of the sampling, and that nobody can draw them again."""
    size = 200_001
    draws = make().normal(0, size)
    assert draws.shape == (size,)
    assert np.isfinite(draws).all()
    assert stats.kstest(draws, "norm").pvalue > 1e-8
    assert draws.var() == pytest.approx(1, abs=6 * (2 / size) ** 0.5)
    assert np.mean(draws**4) == pytest.approx(3, abs=8 * (96 / size) ** 0.5)  # the tails
    assert 3.9 < np.abs(draws).max() < 7.5
    half = size // 2  # Box and Muller's pairs: neither they nor their squares follow each other
    for power in (1, 2):
        one, two = draws[:half] ** power, draws[half : 2 * half] ** power
        assert correlation(one, two) < 6 / half**0.5
    for rate in (1e-3, 0.3, 0.97):
        sample = make().poisson_sample(0, size, rate)
        assert np.array_equal(sample, np.unique(sample))
        slack = 6 * (size * rate * (1 - rate)) ** 0.5
        assert abs(len(sample) - size * rate) < slack
    assert len(make().poisson_sample(0, 1000, 1.0)) == 1000
    check_cannot_be_drawn_again(make)


def check_cannot_be_drawn_again(make: Callable[[], RandomSource]) -> None:
    def draw() -> list[np.ndarray]:
        np.random.seed(0)  # noqa: NPY002 - the point is that it does not matter
        torch.manual_seed(0)
        source = make()
        return [
            source.normal(3, 1000),
            source.normal(3, 1000),
            source.poisson_sample(3, 1000, 0.5).astype(np.float64),
            np.array([source.model_seed()], dtype=np.float64),
        ]

    first, again = draw(), draw()
    assert not np.array_equal(first[0], first[1]), "drawn again"
    for one, two in zip(first, again, strict=True):
        assert not np.array_equal(one, two), "drawn again"
    assert correlation(first[0], again[0]) < 6 / 1000**0.5


def test_secure_source() -> None:
    check_secure_source(SecureRandom)


def test_secure_source_leaves_global_generators_alone() -> None:
    model, theta, data = zero_gradient_case(100, 20)
    np_state, torch_state = np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    local_update(model, theta, data, make_test_plan(n=20), RATE, product_loss, SecureRandom())
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert np.array_equal(np_state[1], np.random.get_state()[1])  # noqa: NPY002


def test_secure_source_reads_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every normal and every decision to sample costs 8 fresh bytes of the system's generator."""
    asked: list[int] = []
    system = os.urandom

    def counted(size: int) -> bytes:
        asked.append(size)
        return system(size)

    monkeypatch.setattr(os, "urandom", counted)
    source = SecureRandom()
    source.normal(0, 1001)
    assert sum(asked) >= 8 * 1001
    asked.clear()
    source.poisson_sample(0, 500, 0.1)
    assert sum(asked) >= 8 * 500
    asked.clear()
    source.model_seed()
    assert sum(asked) >= 8


def test_extreme_bits_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits 0 or all bits 1: finite normals, and rates 0 < q < 1 still mean what they say."""
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(os, "urandom", lambda size, byte=byte: byte * size)
        assert np.isfinite(SecureRandom().normal(0, 64)).all()
        assert len(SecureRandom().poisson_sample(0, 10, 1.0)) == 10
        assert len(SecureRandom().poisson_sample(0, 10, 0.5)) == (10 if byte == b"\x00" else 0)
    assert SecureRandom().normal(0, 0).shape == (0,)


@pytest.mark.parametrize("seed", [0, 1, -1, False, "secret", 2**64])
def test_a_seed_is_refused(seed: object) -> None:
    with pytest.raises(InvalidValueError, match="seed"):
        SecureRandom(seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="seed"):
        SecureRandom(seed=seed)  # type: ignore[arg-type]


class Twister(SecureRandom):
    """A Mersenne twister behind the same methods."""

    def normal(self, step: int, size: int) -> np.ndarray:
        return np.random.standard_normal(size)  # noqa: NPY002


class OnePool(SecureRandom):
    """The system's bytes, drawn once and used again."""

    pool = os.urandom(8 * 500_000)

    def _uniform(self, size: int) -> np.ndarray:
        words = np.frombuffer(self.pool[: 8 * size], dtype=np.uint64)
        return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53


@pytest.mark.parametrize("flawed", [Twister, OnePool, seeded])
def test_planted_generators_are_seen(flawed: Callable[[], RandomSource]) -> None:
    with pytest.raises(AssertionError, match="drawn again"):
        check_cannot_be_drawn_again(flawed)


# ---------------------------------------------------------------- the lowest bits


def multiples(update: Update, rng: RandomSource) -> np.ndarray:
    """A one-step update of zero parameters in units of the public grid."""
    model, theta, data = zero_gradient_case(P, 20)
    plan = make_test_plan(n=20, batch=16, steps=1, clip=CLIP, z=Z)
    delta = update(model, theta, data, plan, 1.0, product_loss, rng).delta.double().numpy()
    return delta * 16 / noise_grid(plan.noise_std)


def check_replies_are_on_the_grid(update: Update, rng: RandomSource) -> None:
    units = multiples(update, rng)
    assert np.array_equal(units, np.round(units)), "between the points of the grid"
    assert 2**20 < units.std() < 2**21  # far below the noise


@pytest.mark.parametrize("name", SOURCES)
def test_noised_sums_lie_on_a_public_grid(name: str) -> None:
    check_replies_are_on_the_grid(local_update, SOURCES[name](0, 1, "a"))


def test_noise_of_full_precision_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noisewise.training.local.noise_grid", lambda std: 1e-300)
    with pytest.raises(AssertionError, match="between the points"):
        check_replies_are_on_the_grid(local_update, SecureRandom())


@pytest.mark.parametrize("std", [1e-12, 0.3, 1.0, 1.999, 2.0, 7e8])
def test_the_grid_is_a_power_of_two_far_below_the_noise(std: float) -> None:
    grid = noise_grid(std)
    assert np.frexp(grid)[0] == 0.5
    assert std * 2.0**-21 < grid <= std * 2.0**-20


def test_the_grid_cells_have_the_normal_law() -> None:
    """What rounding cannot mend: the sampler's own law, checked cell by cell near the centre."""
    draws = np.concatenate([SecureRandom().normal(0, 1_000_000) for _ in range(4)])
    edges = np.linspace(-4, 4, 257)
    counts, _ = np.histogram(draws, edges)
    expected = np.diff(stats.norm.cdf(edges)) * len(draws)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert stats.chi2(len(counts)).cdf(chi) < 1 - 1e-6
    assert abs(draws).max() < np.sqrt(2 * 53 * np.log(2))  # no radius beyond 8.57
