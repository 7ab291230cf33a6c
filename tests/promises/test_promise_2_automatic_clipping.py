"""Guarantee 2 of docs/privacy.md holds for automatic clipping (clip = "normalise") too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_promise_2_sensitivity import CASES, CLIP, ENGINES, MakeEngine, without
from torch import Tensor

from noisewise.training import gradients, make_engine
from noisewise.training.gradients import NORMALISE_GAMMA, FunctionalGradients, NormaliseTo

BOUND = NormaliseTo(CLIP)


def largest_move(make: MakeEngine, name: str) -> float:
    case = CASES[name]()
    engine = make(case.model, case.loss)

    def total(data: gradients.Loss | object) -> Tensor:
        return engine.clipped_sum(case.theta, data.inputs, data.targets, BOUND)  # type: ignore

    whole = total(case.data)
    return max(
        float((whole - total(without(case.data, record))).norm())
        for record in range(len(case.data))
    )


@pytest.mark.parametrize("name", ["linear-32", "mlp-32", "cnn-32"])
@pytest.mark.parametrize("make", ENGINES)
def test_one_record_moves_the_sum_by_at_most_c(make: MakeEngine, name: str) -> None:
    assert CLIP * (1 - 1e-4) <= largest_move(make, name) <= CLIP * (1 + 1e-6)


def test_a_planted_flaw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(squared_norms: Tensor, clip_norm: float | None) -> Tensor:
        assert clip_norm is not None
        return 1.01 * float(clip_norm) / squared_norms.sqrt()

    monkeypatch.setattr(gradients, "clip_factors", too_long)
    assert largest_move(FunctionalGradients, "linear-32") > CLIP * (1 + 1e-6)


def test_each_record_contributes_its_normalised_gradient() -> None:
    case = CASES["linear-64"]()
    for make in (FunctionalGradients, partial(make_engine, isolate=False), make_engine):
        engine = make(case.model, case.loss)
        for record in range(len(case.data)):
            one = [case.data.inputs[[record]], case.data.targets[[record]]]
            plain = engine.clipped_sum(case.theta, *one, None)
            expected = CLIP * plain / (plain.norm() + NORMALISE_GAMMA)
            torch.testing.assert_close(
                engine.clipped_sum(case.theta, *one, BOUND), expected, rtol=2e-5, atol=1e-15
            )


def test_a_broken_record_contributes_nothing() -> None:
    case = CASES["linear-32"]()
    for make in ENGINES:
        engine = make(case.model, case.loss)
        for bad in (float("nan"), float("inf")):
            inputs = case.data.inputs.clone()
            inputs[3] = bad
            rest = without(case.data, 3)
            torch.testing.assert_close(
                engine.clipped_sum(case.theta, inputs, case.data.targets, BOUND),
                engine.clipped_sum(case.theta, rest.inputs, rest.targets, BOUND),
                rtol=1e-6, atol=1e-9,
            )  # fmt: skip
