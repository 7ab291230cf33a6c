"""Guarantee 7 of docs/privacy.md: an audit of the client's real code path agrees.

The audit detects planted flaws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor, nn

from noisewise.errors import InvalidValueError
from noisewise.federation.canary_audit import make_canaries, product_loss, run_audit
from noisewise.privacy import LocalPlan, epsilon_of
from noisewise.privacy.audit_bound import audit_bound, clopper_pearson_upper
from noisewise.privacy.gaussian_dp import gaussian_delta, gaussian_epsilon
from noisewise.privacy.ledger import Ledger, verify_ledger
from noisewise.randomness import SecureRandom
from noisewise.report.audit_report import audit_figure, audit_text
from noisewise.training import FunctionalGradients, LocalUpdate, TensorData, local_update
from noisewise.training.engine import make_engine

CLAIM = 4.377

# ---------------------------------------------------------------- the statistics


@pytest.mark.parametrize(("errors", "trials"), [(0, 50), (7, 50), (300, 1000), (999, 1000)])
def test_clopper_pearson_is_exact(errors: int, trials: int) -> None:
    """At the bound, so few errors have a probability of exactly 1 %."""
    bound = clopper_pearson_upper(errors, trials, 0.99)
    assert binom.cdf(errors, trials, bound) == pytest.approx(0.01, rel=1e-6)
    assert bound > errors / trials


def test_clopper_pearson_at_the_edges() -> None:
    assert clopper_pearson_upper(5, 5) == 1.0
    for errors, trials in ((6, 5), (-1, 5), (0, 0)):
        with pytest.raises(InvalidValueError):
            clopper_pearson_upper(errors, trials)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 6.0, 40.0])
def test_gaussian_epsilon_solves_its_equation(mu: float) -> None:
    epsilon = gaussian_epsilon(mu, 1e-5)
    assert gaussian_delta(mu, epsilon) == pytest.approx(1e-5, rel=1e-6)
    if mu < 10:
        plain = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(
            -epsilon / mu - mu / 2
        )
        assert plain == pytest.approx(1e-5, rel=1e-4)


def test_figures_of_the_promise() -> None:
    """The claim, and what flaws come to: per-layer clipping over two layers, half the noise."""
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(CLAIM, abs=5e-4)
    assert epsilon_of(1.0, 1.0, 1, 1e-5) == pytest.approx(CLAIM, abs=2e-3)
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(-1.0, 1e-5) == 0.0


def simulated_bound(separation: float, seed: int) -> float:
    rng = np.random.default_rng(seed)
    absent = rng.standard_normal(2000)
    return audit_bound(separation + rng.standard_normal(2000), absent, 1e-5).epsilon


def test_the_bound_holds_and_is_not_idle() -> None:
    """Of 400 audits of an exact mechanism, none claims too much, and they come close."""
    bounds = np.array([simulated_bound(1.0, seed) for seed in range(400)])
    assert bounds.max() < CLAIM
    assert 3.4 < np.median(bounds) < 3.8
    wider = np.array([simulated_bound(math.sqrt(2), seed) for seed in range(50)])
    assert wider.min() > CLAIM  # what per-layer clipping does


def test_useless_scores_prove_nothing() -> None:
    scores = np.random.default_rng(0).standard_normal(500)
    assert audit_bound(scores, scores, 1e-5).epsilon < 0.5
    broken = audit_bound(np.full(100, np.nan), np.zeros(100), 1e-5)
    assert (broken.misses, broken.epsilon) == (100, 0.0)


# ---------------------------------------------------------------- the canaries


def test_canaries_have_the_gradients_of_the_promise() -> None:
    clip = 0.7
    canaries = make_canaries(23, clip)
    engine = make_engine(canaries.model, product_loss, isolate=False)
    for j in range(23):
        data = canaries.data
        raw = engine.clipped_sum(
            canaries.theta, data.inputs[j : j + 1], data.targets[j : j + 1], None
        )
        expected = torch.zeros_like(raw)
        expected[[canaries.first[j], canaries.second[j]]] = 10 * clip / math.sqrt(2)
        torch.testing.assert_close(raw, expected, atol=1e-5, rtol=1e-5)
    everywhere = np.concatenate([canaries.first, canaries.second])
    assert len(set(everywhere.tolist())) == 46
    assert engine.fallback_reason is None  # the engine that clients use


# ---------------------------------------------------------------- the audit


def test_correct_code_passes(tmp_path: Path) -> None:
    result = run_audit(folder=tmp_path)
    assert not result.violated
    assert result.claimed == pytest.approx(CLAIM, abs=2e-3)
    assert 2.7 < result.bound.epsilon < CLAIM
    assert result.bound.threshold == 0.5
    assert result.bound.present + result.bound.absent == 4000
    assert "consistent" in audit_text(result)
    assert audit_figure(result).axes[0].get_legend() is not None
    ledgers = sorted(tmp_path.glob("*.ledger"))
    assert len(ledgers) == 4
    for ledger in ledgers:  # one reservation, one seal
        outcome = verify_ledger(ledger)
        assert (outcome.ok, outcome.events) == (True, 2)


Flaw = Callable[..., LocalUpdate]


def half_the_noise(*args: object, **options: object) -> LocalUpdate:
    model, theta, data, plan, rate, loss, rng = args
    weak = replace(plan, noise_multiplier=plan.noise_multiplier / 2)  # type: ignore[type-var]
    return local_update(model, theta, data, weak, rate, loss, rng)  # type: ignore[arg-type]


class NoClipping(FunctionalGradients):
    def clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        return super().clipped_sum(theta, inputs, targets, None)


class LayerClipping(FunctionalGradients):
    """Each layer's part of a gradient is clipped to c by itself."""

    def clipped_sum(
        self, theta: Tensor, inputs: Tensor, targets: Tensor, clip_norm: float | None
    ) -> Tensor:
        assert clip_norm is not None
        by_name = self._by_name(self.layout.unflatten(theta), inputs, targets)
        parts = []
        for name in self.layout.names:
            part = by_name[name].reshape(len(inputs), -1).double()
            factor = (clip_norm / part.norm(dim=1)).clamp(max=1.0)
            parts.append(factor @ part)
        return torch.cat(parts)


def with_engine(engine: type[FunctionalGradients]) -> Flaw:
    def update(
        model: nn.Module,
        theta: Tensor,
        data: TensorData,
        plan: LocalPlan,
        rate: float,
        loss: Callable[[Tensor, Tensor], Tensor],
        rng: SecureRandom,
    ) -> LocalUpdate:
        own = engine(model, loss)
        return local_update(model, theta, data, plan, rate, loss, rng, engine=own)

    return update


@pytest.mark.parametrize(
    ("flaw", "at_least"),
    [(half_the_noise, 7.7), (with_engine(NoClipping), 30.0), (with_engine(LayerClipping), 4.6)],
    ids=["noise x 0.5", "no clipping", "per-layer clipping"],
)
def test_planted_flaws_are_seen(flaw: Flaw, at_least: float) -> None:
    result = run_audit(update=flaw)
    assert result.violated
    assert result.bound.epsilon > at_least
    assert "VIOLATED" in audit_text(result)


def test_the_reference_engine_passes_too() -> None:
    """The flaws above are the flaws, not the engine that they are built on."""
    assert not run_audit(update=with_engine(FunctionalGradients)).violated


def test_a_plan_with_other_noise_and_clip() -> None:
    result = run_audit(noise_multiplier=2.0, clip_norm=0.1, delta=1e-4)
    assert not result.violated
    assert 0.5 < result.bound.epsilon < result.claimed
    scores = np.array(result.absent)
    assert scores.std() == pytest.approx(2.0, rel=0.1)
    assert np.mean(result.present) - scores.mean() == pytest.approx(1.0, abs=0.3)


# ---------------------------------------------------------------- persons as canaries


def clips_each_record(*args: object, **options: object) -> LocalUpdate:
    """Planted: c bounds each record of a person, and the sum of their records is not bounded."""
    model, theta, data, plan, rate, loss, rng = args
    by_record = replace(plan, unit="record", max_records=None)  # type: ignore[type-var]
    return local_update(model, theta, data, by_record, rate, loss, rng)  # type: ignore[arg-type]


@pytest.mark.parametrize("records", [1, 4])
def test_correct_code_passes_with_persons(tmp_path: Path, records: int) -> None:
    result = run_audit(unit="person", records_per_person=records, canaries=500, folder=tmp_path)
    assert not result.violated
    assert result.claimed == pytest.approx(CLAIM, abs=2e-3)
    assert 2.4 < result.bound.epsilon < CLAIM  # every person contributes c, not less
    assert np.mean(result.present) - np.mean(result.absent) == pytest.approx(1.0, abs=0.3)
    assert f"500 persons with {records} records each" in audit_text(result)
    for ledger in tmp_path.glob("*.ledger"):
        with Ledger.inspect(ledger) as book:
            assert book.statement().unit == "person"


def test_clipping_each_record_of_a_person_is_seen() -> None:
    result = run_audit(unit="person", records_per_person=2, canaries=500, update=clips_each_record)
    assert result.violated
    assert result.bound.epsilon > 7.0  # two times c instead of c: 10.0 with endless trials
    assert "VIOLATED" in audit_text(result)


@pytest.mark.slow
def test_five_audits_never_exceed_the_claim() -> None:
    """One audit exceeds it with a probability of about 1 in 2,000: noise here cannot be seeded."""
    bounds = [run_audit().bound.epsilon for _ in range(5)]
    assert max(bounds) < CLAIM
    assert 3.2 < np.median(bounds) < 4.0


def test_few_canaries_and_odd_values_are_refused() -> None:
    for options in (
        {"runs": 0},
        {"noise_multiplier": 0.0},
        {"delta": 1.0},
        {"canaries": 0},
        {"unit": "x"},
    ):
        with pytest.raises(InvalidValueError):
            run_audit(**options)  # type: ignore[arg-type]
