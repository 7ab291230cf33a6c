"""The convergence bound compared with the formula of the appendix, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.errors import InvalidValueError
from noisewise.noise.convergence import convergence_bound

SETTING = {
    "steps": [2, 4, 3],
    "gradient_variance": [0.5, 2.0, 8.0],
    "learning_rate": 1e-4,
    "rounds": 50,
    "smoothness": 2.0,
    "lipschitz": 1.5,
    "heterogeneity": 0.3,
    "gap": 2.3,
}


def test_the_printed_formula() -> None:
    w, lam = [0.5, 0.3, 0.2], [1 / 3] * 3
    e, v, eta, beta = [2, 4, 3], [0.5, 2.0, 8.0], 1e-4, 2.0
    s4, s3v = 16 + 256 + 81, 8 * 0.5 + 64 * 2 + 27 * 8
    psi_sigma = 6 * beta**2 * eta**2 * 10 * (2 * s4 * 0.3 + s3v / 3)
    psi_sigma += beta * eta * (4 * 0.5 + 16 * 2 + 9 * 8)
    mean = sum(a * b for a, b in zip(w, e, strict=True))
    psi_p = 3 * sum(x**2 * (a - b) ** 2 for x, a, b in zip(e, w, lam, strict=True))
    psi_p = 8 / 3 * 1.5**2 * (psi_p + (1 / 3) * sum((x - mean) ** 2 for x in e))
    found = convergence_bound(weights=w, **SETTING)
    assert found.psi_sigma == pytest.approx(psi_sigma)
    assert found.psi_p == pytest.approx(psi_p)
    assert found.noise == pytest.approx(beta * eta * (4 * 0.5 + 16 * 2 + 9 * 8))
    assert found.optimisation == pytest.approx(2.3 / (50 * eta))
    total = 2.3 / (50 * eta) + psi_sigma + psi_p
    assert found.value == pytest.approx(12 / (11 * 2 - 7) * total)
    weighted = convergence_bound(weights=w, weighted_noise=True, **SETTING)
    less = beta * eta * (4 * 0.5 + 16 * 2 + 9 * 8)
    less -= beta * eta * sum(a * a * x * s for a, x, s in zip(w, e, v, strict=True))
    assert found.psi_sigma - weighted.psi_sigma == pytest.approx(less)


def test_both_conditions_on_the_rate() -> None:
    first = 1 / (6 * 2.0 * 4)
    second = 1 / (12 * 2.0 * (10 * 353) ** 0.5)
    bound = convergence_bound(weights=[0.5, 0.3, 0.2], **SETTING)
    assert bound.valid
    assert bound.largest_rate == pytest.approx(min(first, second))
    between = convergence_bound(
        weights=[0.5, 0.3, 0.2], **(SETTING | {"learning_rate": (first + second) / 2})
    )
    assert between.rate_conditions == (True, False)
    far = convergence_bound(weights=[0.5, 0.3, 0.2], **(SETTING | {"learning_rate": 1.0}))
    assert far.rate_conditions == (False, False)
    assert not far.valid


def test_as_printed_it_cannot_reward_noise_aware_weights() -> None:
    setting = SETTING | {"steps": [3, 3, 3]}
    even, aware = [1 / 3] * 3, inverse_variance_weights([0.5, 2.0, 8.0])
    printed = [convergence_bound(weights=w, **setting).value for w in (even, aware)]
    assert printed[0] < printed[1]
    ours = [
        convergence_bound(weights=w, weighted_noise=True, **setting).psi_sigma
        for w in (even, aware)
    ]
    assert ours[1] < ours[0]


def test_the_weights_of_the_least_bound_do_not_depend_on_the_noise() -> None:
    """For uniform lambda they equal lambda; otherwise the minimum of Psi_p is elsewhere."""

    def psi_p(share: float, target: list[float], variance: list[float]) -> float:
        setting = SETTING | {"steps": [150, 19], "gradient_variance": variance}
        return convergence_bound(weights=[share, 1 - share], target=target, **setting).psi_p

    shares = [k / 100 for k in range(101)]
    for target, least in (([0.5, 0.5], 0.5), ([0.8, 0.2], 0.70)):
        for variance in ([1.0, 1.0], [1.0, 1000.0]):
            found = [psi_p(share, target, variance) for share in shares]
            assert shares[found.index(min(found))] == pytest.approx(least, abs=0.011)


def test_one_local_step_is_allowed() -> None:
    """A client that takes one step does not drift; 11 E_min - 7 is then 4."""
    bound = convergence_bound(weights=[0.5, 0.3, 0.2], **(SETTING | {"steps": [1, 4, 3]}))
    total = bound.optimisation + bound.psi_sigma + bound.psi_p
    assert bound.value == pytest.approx(12 / 4 * total)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", [0.5, 0.2, 0.2]), ("steps", [0.5, 4, 3]), ("steps", [4, 3]),
        ("gradient_variance", [1, -1, 1]), ("learning_rate", 0), ("rounds", 0), ("gap", -1),
        ("smoothness", float("nan")), ("target", [1, 1, 1]), ("target", [0.5, 0.5]),
        ("target", ["a", "b", "c"]), ("weights", ["a", "b", "c"]), ("weights", [[0.5], [0.3, 0.2]]),
        ("steps", [float("inf"), 4, 3]), ("steps", ["a", 4, 3]), ("steps", None),
        ("gradient_variance", [1, 1]), ("gradient_variance", ["a", 1, 1]),
        ("gradient_variance", [float("inf"), 1, 1]), ("gap", np.float64(-1)), ("gap", "much"),
        ("lipschitz", np.float64("nan")), ("heterogeneity", True),
    ],
)  # fmt: skip
def test_bad_values_are_named(field: str, value: object) -> None:
    setting = {"weights": [0.5, 0.3, 0.2], **SETTING, field: value}
    with pytest.raises(InvalidValueError, match=field) as error:
        convergence_bound(**setting)
    assert error.value.field == field
    if field in ("gap", "lipschitz", "heterogeneity"):
        assert ">= 0" in error.value.allowed


@pytest.mark.parametrize("field", ["gap", "lipschitz", "heterogeneity"])
@pytest.mark.parametrize("zero", [np.float64(0), np.float32(0), np.int64(0), -0.0])
def test_any_zero_is_allowed(field: str, zero: object) -> None:
    weights = [0.5, 0.3, 0.2]
    plain = convergence_bound(weights=weights, **(SETTING | {field: 0}))
    assert convergence_bound(weights=weights, **(SETTING | {field: zero})) == plain


def test_one_gradient_variance_is_that_of_all() -> None:
    same, each = (
        convergence_bound(weights=[0.5, 0.3, 0.2], **(SETTING | {"gradient_variance": v}))
        for v in (2.0, [2.0] * 3)
    )
    assert same == each
