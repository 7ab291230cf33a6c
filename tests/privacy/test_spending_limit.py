"""The spending limit answers as the accountant does or more strictly, and rarely asks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from ledger_cases import DATASET, instruction, reserve

from noisewise.errors import BudgetSpentError, InvalidValueError
from noisewise.privacy import PrivacyBudget, epsilon_of, spending_limit
from noisewise.privacy.composition import Counts, add_steps, composed_epsilon
from noisewise.privacy.ledger import Charge, Ledger
from noisewise.privacy.spending_limit import SpendingLimit

Cost = tuple[float, float, int]
DELTA = 1e-5
A, B, M = (0.02, 2.0, 10), (0.05, 3.0, 4), (1.0, 60.0, 1)


def in_turn(*costs: Cost) -> Iterable[Cost]:
    return itertools.cycle(costs)


def at_random(*costs: Cost) -> Iterable[Cost]:
    rng = np.random.default_rng(7)
    return (costs[int(rng.integers(len(costs)))] for _ in itertools.count())


def one_after_another(*costs: Cost) -> Iterable[Cost]:
    return itertools.chain(itertools.repeat(costs[0], 25), itertools.cycle(costs[1:]))


PATTERNS: dict[str, Callable[[], Iterable[Cost]]] = {
    "one plan": lambda: in_turn(A),
    "one plan, no sampling": lambda: in_turn(M),
    "training and metrics": lambda: in_turn(A, M),
    "three in turn": lambda: in_turn(A, B, M),
    "at random": lambda: at_random(A, B, M),
    "a change of plan": lambda: one_after_another(A, B),
    "a tiny rate": lambda: in_turn((1e-4, 0.5, 30)),
}


SLOW = ("a tiny rate", "three in turn", "a change of plan")


def check_against_the_slow_reference(
    made: SpendingLimit, pattern: Iterable[Cost], accountant: str, rounds: int
) -> tuple[int, int]:
    """Each answer is that of a fresh accounting of all counts; return rounds and disagreements."""
    counts: Counts = {}
    refused = stricter = 0
    for number, cost in enumerate(pattern):
        allowed = made.allows(counts, *cost)
        spent = composed_epsilon(add_steps(counts, *cost), DELTA, accountant)
        right = spent <= made.epsilon
        assert right or not allowed, f"round {number}: {spent} of {made.epsilon} was allowed"
        stricter += right and not allowed
        if not allowed:
            refused += 1
            if refused > 3:
                break
            continue
        counts = add_steps(counts, *cost)
        if number > rounds:
            break
    return number, stricter


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PATTERNS],
)
def test_answers_are_the_accountants(name: str, accountant: str) -> None:
    start: Counts = {}
    for cost in itertools.islice(PATTERNS[name](), 45):
        start = add_steps(start, *cost)
    epsilon = composed_epsilon(start, DELTA, accountant)
    rounds, stricter = check_against_the_slow_reference(
        SpendingLimit(epsilon, DELTA, accountant), PATTERNS[name](), accountant, 60
    )
    assert rounds >= 45  # nothing is wasted either
    assert stricter == 0


@pytest.mark.parametrize("name", ["one plan", "training and metrics"])
def test_a_limit_that_looks_too_far_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpendingLimit, "_margin", staticmethod(lambda counts, grid: -0.04))
    monkeypatch.setattr(
        spending_limit._Certificate,
        "covers",
        lambda self, total, _: spending_limit._at_most(total, self.high),
    )
    with pytest.raises(AssertionError, match="was allowed"):
        test_answers_are_the_accountants(name, "pld")


@pytest.mark.parametrize("name", ["one plan", "training and metrics", "three in turn", "at random"])
def test_thousands_of_rounds_ask_the_accountant_rarely(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,000 rounds, and not more often towards the end."""
    rounds: Counts = {}
    for cost in itertools.islice(PATTERNS[name](), 4000):
        rounds = add_steps(rounds, *cost)
    made = SpendingLimit(composed_epsilon(rounds, DELTA), DELTA, "pld")
    asked: list[int] = []
    counts: Counts = {}
    number = 0
    real = spending_limit.epsilon_or_zero

    def counted(*args: object) -> float:
        asked.append(number)
        return real(*args)

    monkeypatch.setattr(spending_limit, "epsilon_or_zero", counted)
    for cost in itertools.islice(PATTERNS[name](), 3990):
        assert made.allows(counts, *cost)
        counts = add_steps(counts, *cost)
        number += 1
    assert len(asked) < 200
    assert sum(place > 3000 for place in asked) < 60


def test_accountants_bounds_are_a_limit_too() -> None:
    made = SpendingLimit(900.0, DELTA, "pld")
    assert made.remaining({}, 1e-3, 50.0, 10**6) == 100  # 10^8 steps
    with pytest.raises(InvalidValueError, match="steps = "):
        made.allows({(1e-3, 50.0): 10**8}, 1e-3, 50.0, 1)
    kinds = {(0.01, 50.0 + k): 1 for k in range(64)}
    with pytest.raises(InvalidValueError, match="at most 64 different"):
        made.allows(kinds, 0.5, 3.0, 1)
    assert made.allows(kinds, 0.01, 50.0, 1)


def test_ledgers_opened_one_after_another_share_what_was_found(tmp_path: Path) -> None:
    """A client opens the ledger for each round; the accountant is not asked for each."""
    charge = Charge("training", *A)
    budget = PrivacyBudget(epsilon_of(*A[:2], 60 * A[2], DELTA) * 1.0001, DELTA)
    Ledger.create(tmp_path / "l", budget, DATASET)
    asked = []
    fits = SpendingLimit._fits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SpendingLimit, "_fits", lambda self, counts: asked.append(counts) or fits(self, counts)
        )
        for number in range(60):
            with Ledger.open(tmp_path / "l", dataset_id=DATASET, budget=budget) as ledger:
                ledger.seal(reserve(ledger, number, charge), b"x")
    assert len(asked) < 20
    with (
        Ledger.open(tmp_path / "l", dataset_id=DATASET, budget=budget) as ledger,
        pytest.raises(BudgetSpentError, match="does not allow"),
    ):
        ledger.reserve(instruction("more"), charge)
