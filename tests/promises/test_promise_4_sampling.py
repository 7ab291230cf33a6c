"""Guarantee 4 of docs/privacy.md: Poisson sampling is Poisson; nothing else uses the batch size."""

from __future__ import annotations

import numpy as np
import pytest
from dpsgd import (
    CountingEngine,
    RecordingRandom,
    Update,
    ZeroEngine,
    flawed_update,
    make_test_plan,
    product_loss,
    seeded,
    zero_gradient_case,
)
from scipy import stats

from noisewise.randomness import RandomSource, SecureRandom, SeededRandom
from noisewise.training import local_update

N, BATCH, STEPS = 200, 10, 4000
Q = BATCH / N


def membership(rng: RandomSource, update: Update = local_update) -> np.ndarray:
    """Who was in which batch of a round: [steps, N] of 0 and 1, by way of `local_update`."""
    model, theta, data = zero_gradient_case(3, N)
    plan = make_test_plan(n=N, batch=BATCH, steps=STEPS)
    recorder = RecordingRandom(rng)
    update(model, theta, data, plan, 0.1, product_loss, recorder, engine=ZeroEngine())
    table = np.zeros((STEPS, N))
    for step, sample in enumerate(recorder.samples):
        table[step, sample] = 1.0
        assert len(sample) == len(np.unique(sample))
    return table


def check_poisson(rng: RandomSource) -> None:
    table = membership(rng)
    sizes = table.sum(axis=1)
    assert 0.8 <= sizes.var() / (N * Q * (1 - Q)) <= 1.2, "variance of the batch size"
    assert sizes.mean() == pytest.approx(BATCH, abs=6 * (N * Q * (1 - Q) / STEPS) ** 0.5)
    # The steps of a record, and the records of a step, are independent.
    standard = (table - Q) / (Q * (1 - Q)) ** 0.5
    for lag in (1, 2, N // BATCH):
        follow = (standard[lag:] * standard[:-lag]).mean()
        assert abs(follow) < 6 / (STEPS * N) ** 0.5, "steps depend on each other"
    pairs = standard.T @ standard / STEPS
    assert np.abs(pairs[np.triu_indices(N, 1)]).max() < 10 / STEPS**0.5, "pairs of records"
    # Every record is in with probability q.
    frequency = table.mean(axis=0)
    deviation = (Q * (1 - Q) / STEPS) ** 0.5
    assert np.abs(frequency - Q).max() < 6 * deviation, "frequency of a record"
    spread = ((frequency - Q) ** 2).sum() / deviation**2
    assert stats.chi2(N).cdf(spread) < 1 - 1e-9, "frequency of a record"
    assert stats.chi2(N).sf(spread) < 1 - 1e-9, "frequencies more even than chance"


@pytest.mark.parametrize(
    "rng",
    [seeded(0), seeded(1), SeededRandom(0, 7, "b"), SecureRandom()],
    ids=["seed 0", "seed 1", "other key", "secure"],
)
def test_sampling_is_poisson(rng: RandomSource) -> None:
    check_poisson(rng)


def test_rounds_and_clients_sample_apart() -> None:
    tables = [membership(SeededRandom(*key)) for key in [(0, 1, "a"), (0, 2, "a"), (0, 1, "b")]]
    for i, one in enumerate(tables):
        for two in tables[:i]:
            assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 6 / one.size**0.5


@pytest.mark.parametrize("rng", [seeded(), SecureRandom()], ids=["seeded", "secure"])
def test_rates_at_the_edges(rng: RandomSource) -> None:
    assert list(rng.poisson_sample(0, 50, 1.0)) == list(range(50))
    assert len(rng.poisson_sample(0, 50, 1e-12)) == 0
    assert len(rng.poisson_sample(0, 0, 0.5)) == 0


# ---------------------------------------------------------------- planted samplers


class Sampler(SeededRandom):
    def draw(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, step])


class ShuffledBatches(Sampler):
    """Epochs of batches of one size, as data loaders make them."""

    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        batch = round(size * rate)
        place = step % (size // batch)
        order = np.random.default_rng(step // (size // batch)).permutation(size)
        return np.sort(order[place * batch : (place + 1) * batch])


class FixedSizeBatches(Sampler):
    """Batches of one size, drawn anew at every step."""

    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        return np.sort(self.draw(step).choice(size, round(size * rate), replace=False))


class FavouriteRecord(Sampler):
    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        rates = np.full(size, rate)
        rates[7] *= 1.5
        return np.flatnonzero(self.draw(step).random(size) < rates)


class Couples(Sampler):
    """Records 0 and 1, 2 and 3, ... come together."""

    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        return np.flatnonzero(np.repeat(self.draw(step).random(size // 2), 2) < rate)


class TwoCouples(Sampler):
    """Only records 0 and 1 come together: the sizes look right."""

    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        uniform = self.draw(step).random(size)
        uniform[1] = uniform[0]
        return np.flatnonzero(uniform < rate)


class EverySecondStepAgain(Sampler):
    def poisson_sample(self, step: int, size: int, rate: float) -> np.ndarray:
        return np.flatnonzero(self.draw(step // 2).random(size) < rate)


@pytest.mark.parametrize(
    ("flawed", "seen"),
    [
        (ShuffledBatches, "variance of the batch size"),
        (FixedSizeBatches, "variance of the batch size"),
        (FavouriteRecord, "frequency of a record"),
        (Couples, "variance of the batch size"),
        (TwoCouples, "pairs of records"),
        (EverySecondStepAgain, "steps depend on each other"),
    ],
)
def test_planted_samplers_are_seen(flawed: type[Sampler], seen: str) -> None:
    with pytest.raises(AssertionError, match=seen):
        check_poisson(flawed(0, 1, "a"))


# ---------------------------------------------------------------- what the batch may not decide


def check_empty_batches_take_their_step(update: Update) -> None:
    p, steps, clip, z, rate = 30_000, 40, 2.0, 1.5, 0.1
    model, theta, data = zero_gradient_case(p, 10)
    plan = make_test_plan(n=100, batch=2, steps=steps, clip=clip, z=z)
    recorder = RecordingRandom(seeded())
    noise = update(model, theta, data, plan, rate, product_loss, recorder).delta.double()
    empty = sum(len(sample) == 0 for sample in recorder.samples)
    assert steps / 2 < empty < steps  # most, not all
    expected = steps * (rate * clip * z / 2) ** 2
    assert float(noise.var()) == pytest.approx(expected, rel=0.04), "noise of empty batches"
    assert len(recorder.noises) == steps


def test_empty_batches_take_their_step() -> None:
    check_empty_batches_take_their_step(local_update)
    check_empty_batches_take_their_step(flawed_update(None))


@pytest.mark.parametrize("flaw", ["skips empty batches", "batch decides noise"])
def test_planted_skipping_is_seen(flaw: str) -> None:
    with pytest.raises(AssertionError, match="noise of empty batches"):
        check_empty_batches_take_their_step(flawed_update(flaw))


def check_divisor_is_the_expected_batch(update: Update) -> None:
    """Every record adds c e_0, so coordinate 0 moves by lr c / b for each record that came in."""
    clip, rate, steps = 0.5, 0.2, 300
    model, theta, data = zero_gradient_case(4, 80)  # and the plan counts on 100 records
    plan = make_test_plan(n=100, batch=5, steps=steps, clip=clip, z=1e-9)
    recorder = RecordingRandom(seeded())
    moved = update(
        model, theta, data, plan, rate, product_loss, recorder, engine=CountingEngine()
    ).delta
    came = sum(len(sample) for sample in recorder.samples)
    assert len({len(sample) for sample in recorder.samples}) > 3
    assert set(recorder.rates) == {0.05}, "rate"
    assert float(moved[0]) == pytest.approx(-rate * clip / 5 * came, rel=1e-5), "divisor"


def test_divisor_is_the_expected_batch() -> None:
    check_divisor_is_the_expected_batch(local_update)
    check_divisor_is_the_expected_batch(flawed_update(None))


@pytest.mark.parametrize(
    ("flaw", "seen"),
    [("realised divisor", "divisor"), ("divisor from data", "divisor"), ("rate from data", "rate")],
)
def test_planted_divisors_are_seen(flaw: str, seen: str) -> None:
    with pytest.raises(AssertionError, match=seen):
        check_divisor_is_the_expected_batch(flawed_update(flaw))


def test_a_client_without_records_sends_noise() -> None:
    model, theta, data = zero_gradient_case(1000, 0)
    plan = make_test_plan(steps=5)
    delta = local_update(model, theta, data, plan, 0.1, product_loss, seeded()).delta
    assert float(delta.var()) == pytest.approx(5 * 0.01**2, rel=0.2)
