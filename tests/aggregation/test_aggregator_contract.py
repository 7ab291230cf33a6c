"""Tests that every aggregator must pass, and comparisons of each aggregator with its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from matrices import planted
from numpy.typing import NDArray

from noisewise.aggregation import (
    METHODS,
    Aggregation,
    Aggregator,
    Disclosure,
    ExampleWeighted,
    Method,
    Oracle,
    RobustHDP,
    ServerView,
    State,
    UpdateMatrix,
    WeiAvg,
    make_method,
    plan_clients,
    weighted_sum,
)
from noisewise.data import ClientSpec
from noisewise.errors import InvalidValueError, UpdateError
from noisewise.noise import NoiseEstimate, Norm, excess_noise, make_estimator

# All methods of the table, by name: a new method is tested automatically.
AGGREGATORS: dict[str, Callable[[], Aggregator]] = {
    name: (lambda name=name: make_method(name).aggregator) for name in METHODS
} | {
    "RobustHDP, norm": lambda: RobustHDP(Norm()),
    "RobustHDP, first": lambda: RobustHDP(estimate="first"),
}
EVERY = pytest.mark.parametrize("name", AGGREGATORS)

N_CLIENTS = 8
TOLD = {
    Disclosure.EPSILON: np.array([0.2, 3.0, 0.25, 0.3, 2.5, 0.22, 3.5, 0.28]),
    Disclosure.N_EXAMPLES: np.array([100.0, 300, 50, 120, 80, 210, 90, 400]),
}


def make_view(
    values: torch.Tensor, disclosed: Mapping[Disclosure, NDArray[np.float64]] | None = None
) -> ServerView:
    """Make a view of the columns of ``values``, with all disclosures by default."""
    n = values.shape[1]
    everything = {what: array[:n] for what, array in TOLD.items()}
    everything[Disclosure.TRUE_VARIANCE] = np.geomspace(0.1, 10, n)
    ids = tuple(f"c{k}" for k in range(n))
    return ServerView(UpdateMatrix(values, ids), 1, disclosed or everything)


def noisy_updates(p: int = 300, n: int = N_CLIENTS, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(planted(p, n, seed=seed).updates)


def permuted(view: ServerView, order: list[int]) -> ServerView:
    return ServerView(
        UpdateMatrix(view.updates.values[:, order], tuple(view.updates.ids[k] for k in order)),
        view.round,
        {what: array[order] for what, array in view.disclosed.items()},
    )


# ---------------------------------------------------------------- contracts


def check_sound(answer: Aggregation, view: ServerView) -> None:
    p, n = view.updates.values.shape
    assert answer.weights.shape == (n,)
    assert answer.weights.dtype == np.float64
    assert np.isfinite(answer.weights).all()
    assert (answer.weights >= 0).all()
    assert answer.weights.sum() == pytest.approx(1.0, abs=1e-9)
    assert answer.delta.shape == (p,)
    assert answer.delta.dtype == view.updates.values.dtype
    assert torch.isfinite(answer.delta).all()
    if answer.is_weighted_sum:  # and the weights are those of their own columns
        expected = view.updates.values.double() @ torch.from_numpy(answer.weights)
        size = float(view.updates.values.double().norm())
        torch.testing.assert_close(
            answer.delta.double(), expected, rtol=1e-5, atol=1e-6 * size, msg="other weights"
        )


def check_permutation(aggregator: Aggregator, view: ServerView) -> None:
    base = aggregator.aggregate(view, {})
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    other = aggregator.aggregate(permuted(view, order), {})
    np.testing.assert_allclose(other.weights, base.weights[order], rtol=1e-4, atol=1e-9)
    size = float(base.delta.norm())
    torch.testing.assert_close(other.delta, base.delta, rtol=1e-4, atol=1e-5 * size)


def check_identical_updates(aggregator: Aggregator) -> None:
    column = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    view = make_view(column.repeat(1, N_CLIENTS))
    answer = aggregator.aggregate(view, {})
    check_sound(answer, view)
    torch.testing.assert_close(answer.delta, column[:, 0], rtol=1e-4, atol=1e-5)


class Watched(Mapping[Disclosure, NDArray[np.float64]]):
    """Disclosures that record which of them are read."""

    def __init__(self, inner: Mapping[Disclosure, NDArray[np.float64]]) -> None:
        self.inner, self.seen = inner, set[Disclosure]()

    def __getitem__(self, what: Disclosure) -> NDArray[np.float64]:
        self.seen.add(what)
        return self.inner[what]

    def __contains__(self, what: object) -> bool:
        self.seen.add(what)  # type: ignore[arg-type]
        return what in self.inner

    def __iter__(self) -> Iterator[Disclosure]:
        self.seen.update(self.inner)
        return iter(self.inner)

    def __len__(self) -> int:
        self.seen.update(self.inner)
        return len(self.inner)


def check_reads_only_what_it_declares(aggregator: Aggregator) -> None:
    view = make_view(noisy_updates())
    watched = Watched(view.disclosed)
    full = aggregator.aggregate(replace(view, disclosed=watched), {})
    assert watched.seen <= aggregator.needs, "reads more than it declares"
    # With only what it needs, the result is the same; without it, there is an error.
    declared = {what: view.disclosed[what] for what in aggregator.needs}
    less = aggregator.aggregate(replace(view, disclosed=declared), {})
    assert torch.equal(full.delta, less.delta)
    for what in aggregator.needs:
        without = {other: array for other, array in declared.items() if other != what}
        with pytest.raises(UpdateError, match=what.value):
            aggregator.aggregate(replace(view, disclosed=without), {})


def check_changes_no_input(aggregator: Aggregator) -> None:
    view = make_view(noisy_updates())
    state: State = {}
    for _ in range(3):
        values = view.updates.values.clone()
        copies = {what: array.copy() for what, array in view.disclosed.items()}
        before = {name: array.copy() for name, array in state.items()}
        answer = aggregator.aggregate(view, state)
        assert torch.equal(values, view.updates.values), "changes the updates"
        for what, array in copies.items():
            assert np.array_equal(array, view.disclosed[what]), "changes the disclosed values"
        assert before.keys() == state.keys(), "changes the state"
        assert all(np.array_equal(before[name], state[name]) for name in before)
        assert all(isinstance(array, np.ndarray) for array in answer.state.values())
        state = answer.state


@EVERY
def test_sound(name: str) -> None:
    view = make_view(noisy_updates())
    check_sound(AGGREGATORS[name]().aggregate(view, {}), view)


@EVERY
def test_permuting_clients_permutes_weights(name: str) -> None:
    check_permutation(AGGREGATORS[name](), make_view(noisy_updates()))


@EVERY
def test_identical_updates_come_back(name: str) -> None:
    check_identical_updates(AGGREGATORS[name]())


@EVERY
def test_reads_only_what_it_declares(name: str) -> None:
    check_reads_only_what_it_declares(AGGREGATORS[name]())


@EVERY
def test_changes_no_input(name: str) -> None:
    check_changes_no_input(AGGREGATORS[name]())


def columns_with(kind: str) -> torch.Tensor:
    values = noisy_updates()
    if kind == "a zero column":
        values[:, 2] = 0.0
    elif kind == "all zero":
        values[:] = 0.0
    elif kind == "a constant column":
        values[:, 1] = 0.3
    elif kind == "all constant":
        values[:] = 0.3
    elif kind == "a duplicate":
        values[:, 4] = values[:, 0]
    elif kind == "a scaled duplicate":
        values[:, 4] = 100 * values[:, 0]
    elif kind == "p < n":
        values = values[:3]
    elif kind == "p = 1":
        values = values[:1]
    elif kind == "n = 1":
        values = values[:, :1]
    elif kind == "n = 1, zero":
        values = 0 * values[:, :1]
    elif kind == "n = 2":
        values = values[:, :2]
    elif kind == "tiny":
        values = values * 1e-20
    elif kind == "huge":
        values = values * 1e20
    elif kind == "one huge":
        values[:, 3] *= 1e18
    elif kind == "float64":
        values = values.double()
    return values


KINDS = [
    "a zero column", "all zero", "a constant column", "all constant", "a duplicate",
    "a scaled duplicate", "p < n", "p = 1", "n = 1", "n = 1, zero", "n = 2", "tiny", "huge",
    "one huge", "float64",
]  # fmt: skip


@EVERY
@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_has_an_answer(name: str, kind: str) -> None:
    view = make_view(columns_with(kind))
    answer = AGGREGATORS[name]().aggregate(view, {})
    check_sound(answer, view)
    if kind.startswith("n = 1"):
        assert answer.weights.tolist() == [1.0]
        assert torch.equal(answer.delta, view.updates.values[:, 0])
    if kind == "a zero column" and "RobustHDP" in name:
        assert answer.weights[2] == 0.0


# ---------------------------------------------------------------- planted flaws


@dataclass(frozen=True)
class Plain:
    """Equal weights, with hooks for flaws."""

    @property
    def needs(self) -> frozenset[Disclosure]:
        return frozenset()

    def weights(self, view: ServerView) -> NDArray[np.float64]:
        energy = view.updates.values.double().square().sum(dim=0).numpy()
        return (1 / energy) / (1 / energy).sum()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        weights = self.weights(view)
        return Aggregation(weighted_sum(view.updates.values, weights), weights, None, state)


class SwapsTwoColumns(Plain):
    """Two clients get each other's weights, in the sum and in the report."""

    def weights(self, view: ServerView) -> NDArray[np.float64]:
        weights = super().weights(view)
        return weights[[1, 0, *range(2, len(weights))]]


class SumsWithOtherWeights(Plain):
    """Two clients get each other's weights, in the sum only."""

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        honest = self.weights(view)
        swapped = honest[[1, 0, *range(2, len(honest))]]
        return Aggregation(weighted_sum(view.updates.values, swapped), honest, None, state)


class ForgetsToNormalise(Plain):
    def weights(self, view: ServerView) -> NDArray[np.float64]:
        return 0.5 * super().weights(view)


class LooksAround(Plain):
    def weights(self, view: ServerView) -> NDArray[np.float64]:
        epsilons = view.disclosed.get(Disclosure.EPSILON)
        return super().weights(view) if epsilons is None else epsilons / epsilons.sum()


class ScalesInPlace(Plain):
    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        view.updates.values.mul_(2.0)
        return super().aggregate(view, state)


class WritesToState(Plain):
    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        state["ids"] = np.array(["x"])  # type: ignore[index]
        return super().aggregate(view, state)


def test_the_plain_aggregator_keeps_all_contracts() -> None:
    view = make_view(noisy_updates())
    check_sound(Plain().aggregate(view, {}), view)
    check_permutation(Plain(), view)
    check_identical_updates(Plain())
    check_reads_only_what_it_declares(Plain())
    check_changes_no_input(Plain())


def test_planted_flaws_are_seen() -> None:
    view = make_view(noisy_updates())
    with pytest.raises(AssertionError):
        check_permutation(SwapsTwoColumns(), view)
    for flawed in (SumsWithOtherWeights(), ForgetsToNormalise()):
        with pytest.raises(AssertionError):
            check_sound(flawed.aggregate(view, {}), view)
    with pytest.raises(AssertionError):
        check_identical_updates(ForgetsToNormalise())
    with pytest.raises(AssertionError, match="reads more"):
        check_reads_only_what_it_declares(LooksAround())
    with pytest.raises(AssertionError, match="changes the updates"):
        check_changes_no_input(ScalesInPlace())
    with pytest.raises(AssertionError):
        check_changes_no_input(WritesToState())


# ---------------------------------------------------------------- formulas


def check_formula(aggregator: Aggregator, expected: NDArray[np.float64]) -> None:
    view = make_view(noisy_updates())
    answer = aggregator.aggregate(view, {})
    np.testing.assert_allclose(answer.weights, expected / expected.sum(), rtol=1e-6)
    check_sound(answer, view)


def test_formulas() -> None:
    epsilon, examples = TOLD[Disclosure.EPSILON], TOLD[Disclosure.N_EXAMPLES]
    check_formula(WeiAvg(), epsilon)
    check_formula(ExampleWeighted(), examples)
    check_formula(Oracle(), 1 / np.geomspace(0.1, 10, N_CLIENTS))
    check_formula(make_method("PFA").aggregator, epsilon)
    energy = noisy_updates().double().square().sum(dim=0).numpy()
    check_formula(RobustHDP(Norm()), 1 / energy)
    with pytest.raises(AssertionError):
        check_formula(SwapsTwoColumns(), 1 / energy)
    with pytest.raises(AssertionError):
        check_formula(WeiAvg(), examples)
    with pytest.raises(AssertionError):
        check_formula(RobustHDP(Norm()), 1 / np.sqrt(energy))


def test_robust_hdp_is_close_to_the_oracle() -> None:
    """Algorithm 1 on signal plus noise: the server finds the noise without disclosures."""
    case = planted(4000, 16, seed=3)
    view = make_view(torch.from_numpy(case.updates), disclosed={Disclosure.EPSILON: np.ones(16)})
    answer = RobustHDP().aggregate(view, {})
    assert answer.noise is not None
    assert answer.noise.converged
    assert excess_noise(answer.weights, case.variance) < 1.1
    assert excess_noise(np.full(16, 1 / 16), case.variance) > 2
    swapped = answer.weights.copy()
    worst, best = np.argmin(swapped), np.argmax(swapped)
    swapped[[worst, best]] = swapped[[best, worst]]
    assert excess_noise(swapped, case.variance) > 1.5


SPECS = [ClientSpec(f"c{k}", 100 + k, 10, 1.0 + k, 1e-5) for k in range(3)]


def test_what_clients_do_under_each_method() -> None:
    """MinEpsilon and FedAvg differ from DPFedAvg only at the clients."""
    for name in METHODS:
        method = make_method(name)
        plans = plan_clients(SPECS, method, rounds=2, clip_norm=1.0)
        budgets = [plan.budget.epsilon if plan.budget else None for plan in plans]
        expected = {"MinEpsilon": [1.0] * 3, "FedAvg": [None] * 3}.get(name, [1.0, 2.0, 3.0])
        assert budgets == expected
        assert [plan.expected_batch for plan in plans] == [10] * 3
    kinds = {type(make_method(n).aggregator) for n in ("DPFedAvg", "MinEpsilon", "FedAvg")}
    assert kinds == {ExampleWeighted}
    with_needs = ("WeiAvg", "PFA", "BudgetAvg", "DPFedAvg", "MinEpsilon", "FedAvg", "Oracle")
    assert all(make_method(n).needs for n in with_needs)
    assert not any(make_method(n).needs for n in ("NoiseWise", "RobustHDP", "Alone"))


def test_unknown_methods_and_options_are_named() -> None:
    with pytest.raises(InvalidValueError, match=r"method\.name.*RobustHDP"):
        make_method("Krum")
    with pytest.raises(InvalidValueError, match=r"method\.options"):
        make_method("PFA", {"dimensions": 2})
    with pytest.raises(InvalidValueError, match="dimension"):
        make_method("PFA", {"dimension": 0})
    with pytest.raises(InvalidValueError, match="estimate"):
        RobustHDP(estimate="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="estimator"):
        RobustHDP(estimator=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"method\.name"):
        make_method("math:pi")


class Equal:
    """An aggregator without a base class."""

    needs: Any = ()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        return Aggregation(view.updates.values.mean(1), np.ones(view.updates.n_clients))


@pytest.mark.parametrize("needs", [None, "epsilon", ["epsilon"], 3])
def test_what_an_own_aggregator_needs_is_a_set_of_disclosures(needs: object) -> None:
    class Wrong(Equal):
        pass

    Wrong.needs = needs
    with pytest.raises(InvalidValueError, match=r"mine\.needs.*Disclosure"):
        Method("mine", Wrong())


def test_a_class_is_no_aggregator() -> None:
    assert Method("mine", Equal()).name == "mine"
    with pytest.raises(InvalidValueError, match=r"not the class Equal; call the class"):
        Method("mine", Equal)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"must be an aggregator"):
        Method("mine", object())  # type: ignore[arg-type]


# ---------------------------------------------------------------- an estimate that is remembered


class Script:
    """An estimator that returns given values, round by round."""

    name = "script"

    def __init__(self, *rounds: list[float]) -> None:
        self.rounds = list(rounds)

    def estimate(self, updates: torch.Tensor) -> NoiseEstimate:
        variance = np.array(self.rounds.pop(0))
        assert len(variance) == updates.shape[1]
        return NoiseEstimate(variance, self.name)


def play(aggregator: Aggregator, ids: str, state: State) -> tuple[dict[str, float], State]:
    values = torch.randn(5, len(ids), generator=torch.Generator().manual_seed(len(ids)))
    view = ServerView(UpdateMatrix(values, tuple(ids)), 1, {})
    answer = aggregator.aggregate(view, state)
    return dict(zip(ids, answer.weights.tolist(), strict=True)), answer.state


def test_first_remembers_and_late_joiners_are_estimated() -> None:
    first = RobustHDP(Script([1.0, 3.0], [3.0, 1.0, 4.0]), estimate="first")
    weights, state = play(first, "ab", {})
    assert weights == pytest.approx({"a": 0.75, "b": 0.25})
    weights, state = play(first, "ba", state)  # another order, no estimate
    assert weights == pytest.approx({"a": 0.75, "b": 0.25})
    weights, state = play(first, "a", state)
    assert weights == {"a": 1.0}
    before = {name: array.copy() for name, array in state.items()}
    weights, later = play(first, "bac", state)  # c is new: its estimate counts, the others' stay
    shares = np.array([1 / 3, 1, 1 / 4])
    assert list(weights.values()) == pytest.approx(list(shares / shares.sum()))
    assert all(np.array_equal(before[name], state[name]) for name in before)
    weights, _ = play(first, "abc", later)  # and c is remembered from now on
    assert weights == pytest.approx(dict(zip("bac", shares / shares.sum(), strict=True)))
    assert not first.estimator.rounds  # type: ignore[attr-defined]


def test_every_estimates_every_round() -> None:
    every = RobustHDP(Script([1.0, 3.0], [3.0, 1.0]))
    one, state = play(every, "ab", {})
    two, state = play(every, "ab", state)
    assert one == pytest.approx({"a": 0.75, "b": 0.25})
    assert two == pytest.approx({"a": 0.25, "b": 0.75})


def test_estimators_by_name_serve_robust_hdp() -> None:
    method = make_method("RobustHDP", {"estimator": "norm", "estimate": "first"})
    assert method.aggregator == RobustHDP(make_estimator("norm"), "first")


def test_update_matrices_that_do_not_fit() -> None:
    with pytest.raises(UpdateError, match="one id for each column"):
        UpdateMatrix(torch.zeros(3, 2), ("a",))
    with pytest.raises(UpdateError, match="one id for each column"):
        UpdateMatrix(torch.zeros(3), ("a",))
    with pytest.raises(UpdateError, match="every client dropped out"):
        UpdateMatrix(torch.zeros(3, 0), ())


def test_weighted_sum_by_blocks() -> None:
    values, weights = noisy_updates(p=1000), np.arange(8) / 28
    expected = (values.double().numpy() @ weights).astype(np.float32)
    for rows in (1, 7, 1000, 5000):
        got = weighted_sum(values, weights, block_rows=rows)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-7)
