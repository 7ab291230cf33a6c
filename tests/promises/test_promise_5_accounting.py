"""Guarantee 5 of docs/privacy.md: accounting never rounds in our favour (plans, accountants)."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import norm

from noisewise.data import ClientSpec
from noisewise.errors import AccountingError, InvalidValueError
from noisewise.privacy import (
    ACCOUNTANTS,
    LocalPlan,
    PrivacyBudget,
    accounting,
    calibrate,
    epsilon_of,
    epsilon_spent,
    make_plan,
    non_private_plan,
    overall_guarantee,
    pld_accountant,
)
from noisewise.privacy.renyi_accountant import moments_floor

Epsilon = Callable[[float, float, int, float], float]
"""(sample_rate, noise_multiplier, steps, delta) -> epsilon."""


# ---------------------------------------------------------------- random plans


def random_specs(count: int, seed: int) -> list[tuple[ClientSpec, int, str]]:
    """Specs, rounds and accountants over several orders of magnitude."""
    rng = np.random.default_rng(seed)
    cases = []
    for k in range(count):
        n = int(np.exp(rng.uniform(np.log(20), np.log(20_000))))
        batch = int(np.clip(np.exp(rng.uniform(0, np.log(n))), max(1, n // 1000), n))
        accountant = ("pld", "rdp", "moments")[k % 3]
        delta = float(10 ** rng.uniform(-7, -2.5))
        epsilon = float(np.exp(rng.uniform(np.log(0.1), np.log(12))))
        if accountant == "moments":
            epsilon += moments_floor(delta)
        spec = ClientSpec(f"c{k}", n, batch, epsilon, delta, int(rng.integers(1, 4)))
        cases.append((spec, int(np.exp(rng.uniform(0, np.log(200)))), accountant))
    return cases


@cache
def random_plans(count: int, seed: int = 0) -> tuple[LocalPlan, ...]:
    return tuple(
        make_plan(spec, rounds=rounds, clip_norm=1.0, accountant=accountant)
        for spec, rounds, accountant in random_specs(count, seed)
    )


def independent_rdp(q: float, z: float, steps: int, delta: float) -> float:
    """Dp-accounting as its manual says, without a line of ours."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    accountant = rdp.RdpAccountant()
    logging.getLogger("absl").setLevel(logging.ERROR)
    return float(accountant.compose(event, steps).get_epsilon(delta))


def check_plans(plans: Sequence[LocalPlan]) -> None:
    """Each stored z spends at most its budget, and at least 99% of it."""
    for plan in plans:
        assert plan.budget is not None
        steps = plan.rounds * plan.steps_per_round
        reached = epsilon_of(
            plan.sample_rate, plan.noise_multiplier, steps, plan.budget.delta, plan.accountant
        )
        assert reached <= plan.budget.epsilon, f"overspends: {plan}"
        assert reached >= 0.99 * plan.budget.epsilon, f"wastes budget: {plan}"
        if plan.accountant == "rdp":
            other = independent_rdp(
                plan.sample_rate, plan.noise_multiplier, steps, plan.budget.delta
            )
            assert other <= plan.budget.epsilon * (1 + 1e-12), f"overspends: {plan}"


def test_random_plans() -> None:
    check_plans(random_plans(60))


@pytest.mark.slow
def test_200_random_plans() -> None:
    check_plans(random_plans(200, seed=1))


def test_planted_noise_is_seen() -> None:
    """1.5% less noise, z rounded to a decimal (here and there down), 2% more noise."""
    plans = random_plans(60)[:30]
    check_plans(plans)
    less = [replace(p, noise_multiplier=p.noise_multiplier * 0.985) for p in plans]
    rounded = [replace(p, noise_multiplier=round(p.noise_multiplier, 1)) for p in plans]
    twice = [replace(p, rounds=p.rounds * 2) for p in plans]
    for flawed in (less, rounded, twice):
        with pytest.raises(AssertionError, match="overspends"):
            check_plans(flawed)
    with pytest.raises(AssertionError, match="wastes budget"):
        check_plans([replace(p, noise_multiplier=p.noise_multiplier * 1.03) for p in plans])


@pytest.mark.parametrize(
    ("n", "batch", "epsilon", "rounds"),
    [
        (1, 1, 1.0, 1),  # one record, q = 1
        (50, 50, 0.5, 40),  # q = 1
        pytest.param(10**6, 10, 1.0, 1, marks=pytest.mark.slow),  # q = 1e-5
        (100, 7, 500.0, 10),  # hardly any noise
    ],
)
def test_plans_at_the_edges(n: int, batch: int, epsilon: float, rounds: int) -> None:
    plan = make_plan(ClientSpec("a", n, batch, epsilon, 1e-6), rounds=rounds, clip_norm=1.0)
    check_plans([plan])


def test_a_tiny_rate_with_little_noise_does_not_eat_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One such plan once took 15 GB and 12 minutes."""
    sizes = []
    make = pld_accountant.one_step_distribution

    def measured(*args: float) -> object:
        made = make(*args)
        sizes.append(made._pmf_remove.size)
        return made

    monkeypatch.setattr(pld_accountant, "one_step_distribution", measured)
    assert ACCOUNTANTS["pld"](1e-5, 0.46, 100_000, 1e-6) == pytest.approx(1.0768, rel=0.003)
    assert max(sizes) < 250_000


# ---------------------------------------------------------- the figures of docs/design_figures.md


@pytest.mark.parametrize(("accountant", "z"), [("pld", 9.67), ("rdp", 10.7), ("moments", 14.24)])
def test_z_of_the_issue(accountant: str, z: float) -> None:
    found = calibrate(PrivacyBudget(0.5, 1e-4), 32 / 2400, 15_000, accountant)
    assert found.noise_multiplier == pytest.approx(z, rel=0.005)


EPSILONS = (0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
FIGURES = {
    "moments": [(39.8,), (23.6,), (14.2,), (7.25,), (3.77,), (1.73,)],
    "rdp": [(24.4,), (17.0,), (10.7,), (5.79,), (3.18,), (1.57,)],
    "pld": [(21.8, 22.8), (15.2, 15.7), (9.67, 9.84), (5.31,), (2.94,), (1.48,)],
}


@pytest.mark.parametrize("accountant", FIGURES)
def test_z_of_the_table(accountant: str) -> None:
    for epsilon, figures in zip(EPSILONS, FIGURES[accountant], strict=True):
        z = calibrate(PrivacyBudget(epsilon, 1e-4), 32 / 2400, 15_000, accountant).noise_multiplier
        assert 0.99 * min(figures) <= z <= 1.01 * max(figures)


# ---------------------------------------------------------------- the accountants themselves


def random_mechanisms(count: int, seed: int) -> list[tuple[float, float, int, float]]:
    rng = np.random.default_rng(seed)
    return [
        (
            float(10 ** rng.uniform(-3, -0.3)),
            float(np.exp(rng.uniform(np.log(0.6), np.log(15)))),
            int(np.exp(rng.uniform(0, np.log(20_000)))),
            float(10 ** rng.uniform(-7, -3)),
        )
        for _ in range(count)
    ]


def check_order(tight: Epsilon, middle: Epsilon, loose: Epsilon) -> None:
    for mechanism in random_mechanisms(25, seed=3):
        answers = []
        for accountant in (tight, middle, loose):
            try:
                answers.append(accountant(*mechanism))
            except AccountingError:  # a 0: at this delta there is nothing to promise
                answers.append(0.0)
        assert answers[0] <= answers[1] * (1 + 1e-9), mechanism
        assert answers[1] <= answers[2] * (1 + 1e-9), mechanism


def by_name(name: str) -> Epsilon:
    return lambda q, z, steps, delta: epsilon_of(q, z, steps, delta, name)


def test_pld_at_most_rdp_at_most_moments() -> None:
    check_order(by_name("pld"), by_name("rdp"), by_name("moments"))
    with pytest.raises(AssertionError):
        check_order(by_name("rdp"), by_name("pld"), by_name("moments"))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang, 2018, theorem 8: delta of one Gaussian step with z = 1/mu, exactly."""
    return float(
        norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    )


def check_without_sampling(accountant: Epsilon) -> None:
    """At q = 1, T steps are one Gaussian step with mu = sqrt(T)/z, whose delta is known exactly."""
    for z, steps, delta in [(1.0, 1, 1e-5), (5.0, 30, 1e-6), (40.0, 1000, 1e-4), (0.5, 1, 1e-9)]:
        mu = math.sqrt(steps) / z
        exact = brentq(lambda e, mu=mu, delta=delta: gaussian_delta(mu, e) - delta, 1e-9, 200)
        ours = accountant(1.0, z, steps, delta)
        assert exact * (1 - 1e-9) <= ours <= exact * 1.003, (z, steps, delta, exact, ours)


def sampled_delta(q: float, z: float, epsilon: float) -> float:
    """Delta of one step with sampling, the larger of removing and adding a record, exactly.

    Both distributions' likelihood ratio is monotone, so each hockey-stick divergence is a
    difference of tails beyond one point.
    """

    def mixture_tail(x: float) -> float:
        return float((1 - q) * norm.sf(x / z) + q * norm.sf((x - 1) / z))

    # Removing: mixture against N(0, z^2); ratio above e^eps beyond x.
    x = z * z * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
    removing = mixture_tail(x) - math.exp(epsilon) * float(norm.sf(x / z))
    # Adding: N(0, z^2) against the mixture; the ratio is at most 1/(1-q).
    adding = 0.0
    if math.exp(-epsilon) > 1 - q:
        y = z * z * math.log((math.exp(-epsilon) - 1 + q) / q) + 0.5
        adding = float(norm.cdf(y / z)) - math.exp(epsilon) * (1 - mixture_tail(y))
    return max(removing, adding)


def check_one_step(accountant: Epsilon) -> None:
    for q, z, delta in [(0.01, 1.0, 1e-5), (0.3, 0.8, 1e-4), (0.9, 2.0, 1e-3), (0.1, 0.5, 1e-6)]:
        exact = brentq(lambda e, q=q, z=z, d=delta: sampled_delta(q, z, e) - d, 1e-9, 100)
        ours = accountant(q, z, 1, delta)
        assert exact * (1 - 1e-9) <= ours <= exact * 1.01, (q, z, delta, exact, ours)


@cache
def simulated_losses(q: float, z: float, steps: int) -> np.ndarray:
    """Total privacy losses of runs with the record against runs without it: brute force."""
    rng = np.random.default_rng(5)
    total = np.zeros(300_000)
    for _ in range(steps):
        x = rng.standard_normal(total.size) * z + (rng.random(total.size) < q)
        total += np.log1p(q * np.expm1((2 * x - 1) / (2 * z * z)))
    return total


def check_against_simulation(accountant: Epsilon) -> None:
    for q, z, steps in [(0.05, 1.0, 60), (0.2, 3.0, 60), (0.01, 0.7, 60)]:
        delta = 0.01
        epsilon = accountant(q, z, steps, delta)
        each = np.maximum(0.0, -np.expm1(epsilon - simulated_losses(q, z, steps)))
        error = each.std() / math.sqrt(each.size)
        assert each.mean() <= delta + 4 * error, "promises too much"
        assert each.mean() >= 0.97 * delta - 4 * error, "wastes"


def test_pld_without_sampling_is_the_gaussian_mechanism() -> None:
    check_without_sampling(by_name("pld"))


def test_pld_of_one_step_is_exact() -> None:
    check_one_step(by_name("pld"))


def test_pld_against_simulation() -> None:
    check_against_simulation(by_name("pld"))


OPTIMISTS: dict[str, Epsilon] = {
    "epsilon x 0.97": lambda q, z, steps, delta: 0.97 * epsilon_of(q, z, steps, delta),
    "noise x 1.05": lambda q, z, steps, delta: epsilon_of(q, 1.05 * z, steps, delta),
    "delta x 2": lambda q, z, steps, delta: epsilon_of(q, z, steps, 2 * delta),
}


@pytest.mark.parametrize("name", OPTIMISTS)
def test_planted_optimism_is_seen(name: str) -> None:
    for check in (check_without_sampling, check_one_step, check_against_simulation):
        with pytest.raises(AssertionError):
            check(OPTIMISTS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism",
    [(32 / 2400, 9.67, 15_000, 1e-4), (0.001, 0.8, 20_000, 1e-5), (1e-4, 0.5, 10_000, 1e-6)],
)
def test_pld_against_a_much_finer_grid(mechanism: tuple[float, float, int, float]) -> None:
    q, z, steps, delta = mechanism
    fine = privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=2e-5, pessimistic_estimate=True
    )
    epsilon = fine.self_compose(steps).get_epsilon_for_delta(delta)
    # Both are upper bounds; the optimistic twin of the fine one bounds from below.
    low = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=q,
        value_discretization_interval=2e-5,
        pessimistic_estimate=False,
        use_connect_dots=False,
    )
    least = low.self_compose(steps).get_epsilon_for_delta(delta)
    ours = epsilon_of(q, z, steps, delta)
    assert least <= ours
    assert ours == pytest.approx(epsilon, rel=0.005)


# ---------------------------------------------------------------- answers that are none


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """An accountant whose every answer is the given number."""

    def install(answer: float) -> None:
        table = {**ACCOUNTANTS, "pld": lambda *_: answer}
        monkeypatch.setattr(accounting, "ACCOUNTANTS", table)
        epsilon_of.cache_clear()

    yield install
    epsilon_of.cache_clear()


@pytest.mark.parametrize("answer", [0.0, -1.0, math.nan, math.inf])
def test_no_answer_is_an_error(stubborn: Callable[[float], None], answer: float) -> None:
    stubborn(answer)
    with pytest.raises(AccountingError, match="epsilon"):
        epsilon_of(0.1, 1.0, 10, 1e-5)
    stubborn(0.7)
    assert epsilon_of(0.1, 1.0, 10, 1e-5) == 0.7


def test_a_real_zero_is_an_error() -> None:
    assert ACCOUNTANTS["pld"](0.01, 1e5, 1, 1e-2) == 0.0  # what dp-accounting says
    with pytest.raises(AccountingError, match="epsilon = 0"):
        epsilon_of(0.01, 1e5, 1, 1e-2)


@pytest.mark.parametrize("z", [1e200, 1e-200])
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_numbers_out_of_range_are_errors(z: float, accountant: str) -> None:
    with pytest.raises(AccountingError):
        epsilon_of(0.01, z, 10, 1e-5, accountant)


@pytest.mark.parametrize("accountant", ["rdp", "moments"])
def test_negative_renyi_divergence_is_an_error(
    monkeypatch: pytest.MonkeyPatch, accountant: str
) -> None:
    """Dp-accounting turns it into epsilon 0 with a logged warning."""

    class Broken(rdp.RdpAccountant):
        def compose(self, event: object, count: int = 1) -> Broken:
            super().compose(event, count)
            self._rdp = -np.abs(self._rdp)
            return self

    monkeypatch.setattr(rdp, "RdpAccountant", Broken)
    epsilon_of.cache_clear()
    with pytest.raises(AccountingError, match="numerically valid"):
        epsilon_of(0.02, 1.5, 77, 1e-5, accountant)
    epsilon_of.cache_clear()


@pytest.mark.parametrize("delta", [1e-4, 1e-6])
def test_below_the_floor_of_moments_is_a_named_error(delta: float) -> None:
    floor = moments_floor(delta)
    assert floor == pytest.approx(math.log(1 / delta) / 63)
    for epsilon in (floor, 0.5 * floor):
        with pytest.raises(AccountingError, match=r"client site: .*floor .*pld"):
            make_plan(
                ClientSpec("site", 2400, 32, epsilon, delta),
                rounds=10, clip_norm=1.0, accountant="moments",
            )  # fmt: skip
    above = ClientSpec("site", 2400, 32, 1.02 * floor, delta)
    check_plans([make_plan(above, rounds=10, clip_norm=1.0, accountant="moments")])


# ---------------------------------------------------------------- fields

NOT_POSITIVE = [
    0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, None, True, False, "1", "inf", "",
    [1.0], 1j, Decimal("0.5"), np.float64("nan"), np.True_,
]  # fmt: skip
GOOD_SPEC = {"id": "a", "n_examples": 100, "batch_size": 10, "epsilon": 1.0, "delta": 1e-5}
GOOD_PLAN = {
    "sample_rate": 0.1, "expected_batch": 10, "steps_per_round": 10, "clip_norm": 1.0,
    "noise_multiplier": 1.0, "rounds": 5, "accountant": "pld", "budget": PrivacyBudget(1.0, 1e-5),
}  # fmt: skip
GOOD_CALL = {"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": 3, "delta": 1e-5}


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=lambda v: str(v)[:12])
def test_bad_values_name_their_field(value: object) -> None:
    def refused(field: str, call: Callable[[], object]) -> None:
        with pytest.raises(InvalidValueError) as caught:
            call()
        assert caught.value.field.endswith(field)
        assert field in str(caught.value)

    for field in ("epsilon", "delta", "n_examples", "batch_size"):
        refused(field, lambda f=field: ClientSpec(**(GOOD_SPEC | {f: value})))
    for field in ("epsilon", "delta"):
        good = {"epsilon": 1.0, "delta": 1e-5}
        refused(field, lambda f=field, g=good: PrivacyBudget(**(g | {f: value})))
    for field in ("sample_rate", "expected_batch", "steps_per_round", "clip_norm", "rounds",
                  "noise_multiplier"):  # fmt: skip
        refused(field, lambda f=field: LocalPlan(**(GOOD_PLAN | {f: value})))
    spec = ClientSpec(**GOOD_SPEC)
    refused("rounds", lambda: make_plan(spec, rounds=value, clip_norm=1.0))
    refused("clip_norm", lambda: make_plan(spec, rounds=3, clip_norm=value))
    if not isinstance(value, list):  # cached: arguments are hashed first
        for field in ("sample_rate", "noise_multiplier", "steps"):
            epsilon_of(**(GOOD_CALL | {field: 1}))  # in the cache, where True is 1
        for field in GOOD_CALL:
            refused(field, lambda f=field: epsilon_of(**(GOOD_CALL | {f: value})))
        budget = PrivacyBudget(1.0, 1e-5)
        refused("sample_rate", lambda: calibrate(budget, value, 10))
        refused("steps", lambda: calibrate(budget, 0.1, value))


def test_fractions_and_whole_numbers() -> None:
    with pytest.raises(InvalidValueError, match="epsilon"):
        PrivacyBudget(10**400, 1e-5)  # beyond the range of floats
    for delta in (1.0, 1.5):
        with pytest.raises(InvalidValueError, match="delta"):
            PrivacyBudget(1.0, delta)
    with pytest.raises(InvalidValueError, match="steps"):
        epsilon_of(0.1, 1.0, 2.5, 1e-5)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"batch_size.*at most"):
        ClientSpec("a", 10, 11, 1.0, 1e-5)
    with pytest.raises(InvalidValueError, match=r"accountant.*pld, rdp, moments"):
        make_plan(ClientSpec(**GOOD_SPEC), rounds=1, clip_norm=1.0, accountant="prv")
    assert PrivacyBudget(np.float64(1.0), np.float32(1e-5)).epsilon == 1.0


# ---------------------------------------------------------------- steps


def check_steps(steps_of: Callable[[ClientSpec], int]) -> None:
    nasty = [(49, 1), (10, 3), (10, 10), (2400, 32), (3, 2), (10**9 + 7, 10**5), (1, 1)]
    rng = np.random.default_rng(0)
    for batch in rng.integers(1, 2000, size=2000):  # N/b whole: 1/q in floats lands beside it
        nasty.append((int(batch) * int(rng.integers(1, 3000)), int(batch)))
    for n, batch in nasty:
        for epochs in (1, 3):
            whole = n // batch + (n % batch > 0)
            assert steps_of(ClientSpec("a", n, batch, 1.0, 1e-5, epochs)) == epochs * whole


def test_steps_are_counted_in_integers() -> None:
    check_steps(lambda spec: spec.steps_per_round)
    check_steps(lambda spec: non_private_plan(spec, rounds=2).steps_per_round)
    plan = make_plan(ClientSpec("a", 49, 1, 1.0, 1e-5, 3), rounds=2, clip_norm=1.0)
    assert plan.steps_per_round == 147
    assert type(plan.steps_per_round) is int
    with pytest.raises(AssertionError):
        check_steps(lambda spec: spec.local_epochs * math.ceil(1 / spec.sample_rate))
    with pytest.raises(AssertionError):
        check_steps(lambda spec: math.ceil(spec.local_epochs * spec.n_examples / spec.batch_size))


# ---------------------------------------------------------------- what is spent

SPENDING = [
    (ClientSpec("a", 400, 20, 1.0, 1e-5), 12, "pld"),
    (
        ClientSpec("b", 337, 84, 0.104, 0.0062),
        57,
        "pld",
    ),  # a 0 at first; once fell from round 1 to 2
    (ClientSpec("c", 3608, 476, 0.139, 0.009, 2), 40, "pld"),
    (ClientSpec("d", 60, 60, 3.0, 1e-4), 9, "pld"),
    (ClientSpec("e", 337, 84, 0.5, 0.001), 12, "rdp"),
    (ClientSpec("f", 500, 10, 2.0, 1e-5), 12, "moments"),
]


def check_spending(plan: LocalPlan, spent: Callable[[LocalPlan, int], float]) -> None:
    assert plan.budget is not None
    rounds = sorted({*range(1, min(plan.rounds, 8)), plan.rounds // 2, plan.rounds})
    path = [spent(plan, r) for r in rounds]
    assert min(path) > 0, "nothing spent after a round"
    assert all(one <= two for one, two in itertools.pairwise(path)), "falls"
    assert 0.99 * plan.budget.epsilon <= path[-1] <= plan.budget.epsilon, "end"
    assert spent(plan, plan.rounds + 5) > path[-1]
    for done, epsilon in zip(rounds, path, strict=True):
        steps = done * plan.steps_per_round
        raw = ACCOUNTANTS[plan.accountant](
            plan.sample_rate, plan.noise_multiplier, steps, plan.budget.delta
        )
        assert epsilon >= raw, "less than the accountant says"


@pytest.mark.parametrize("case", SPENDING, ids=lambda case: case[0].id)
def test_spending(case: tuple[ClientSpec, int, str]) -> None:
    spec, rounds, accountant = case
    plan = make_plan(spec, rounds=rounds, clip_norm=1.0, accountant=accountant)
    assert epsilon_spent(plan, 0) == 0.0
    check_spending(plan, epsilon_spent)


def test_planted_spending_is_seen() -> None:
    spec, rounds, accountant = SPENDING[1]
    plan = make_plan(spec, rounds=rounds, clip_norm=1.0, accountant=accountant)

    def raw(plan: LocalPlan, done: int, delta_share: float = 1.0) -> float:
        return ACCOUNTANTS[plan.accountant](
            plan.sample_rate,
            plan.noise_multiplier,
            done * plan.steps_per_round,
            plan.budget.delta * delta_share,
        )

    flaws = {
        "nothing spent": raw,
        "falls": lambda p, r: raw(p, r) or raw(p, r, 0.1),
        "end": lambda p, r: raw(p, r + 1),
        "less than": lambda p, r: epsilon_spent(p, max(1, r - 3)) if r < p.rounds
        else epsilon_spent(p, r),
    }  # fmt: skip
    for seen, flawed in flaws.items():
        with pytest.raises(AssertionError, match=seen):
            check_spending(plan, flawed)


def test_spending_without_a_budget() -> None:
    plan = non_private_plan(ClientSpec(**GOOD_SPEC), rounds=3)
    assert epsilon_spent(plan, 0) == 0.0
    assert epsilon_spent(plan, 1) == math.inf
    with pytest.raises(InvalidValueError, match="rounds_done"):
        epsilon_spent(plan, -1)
    with pytest.raises(InvalidValueError, match="budget"):
        LocalPlan(**(GOOD_PLAN | {"budget": None}))


def test_overall_guarantee() -> None:
    budgets = [PrivacyBudget(1.0, 1e-5), PrivacyBudget(0.5, 1e-3), PrivacyBudget(2.0, 1e-6)]
    assert overall_guarantee(budgets) == PrivacyBudget(2.0, 1e-3)
    assert overall_guarantee(iter(budgets[:1])) == budgets[0]
    with pytest.raises(InvalidValueError, match="budgets"):
        overall_guarantee([])


def test_a_stand_in_for_a_spec_is_checked_too() -> None:
    """`make_plan` builds its own budget: nobody gets past the checks with a look-alike."""
    fake = SimpleNamespace(**GOOD_SPEC, local_epochs=1, sample_rate=0.1, steps_per_round=10)
    for epsilon in (0.0, math.nan, math.inf):
        fake.epsilon = epsilon
        with pytest.raises(InvalidValueError, match="epsilon"):
            make_plan(fake, rounds=2, clip_norm=1.0)  # type: ignore[arg-type]
