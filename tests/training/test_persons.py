"""Person-level DP-SGD compared with a loop over persons in float64. Stated tolerance: 1e-5."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from dpsgd import make_test_plan, seeded
from gradient_cases import single_gradients, theta_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.privacy import LocalPlan
from noisewise.privacy.plan import make_plan
from noisewise.randomness import SecureRandom, SeededRandom
from noisewise.training import TensorData, local_update, make_engine
from noisewise.training.gradients import NORMALISE_GAMMA
from noisewise.training.heads import HeadRecords, head_of, head_updates
from noisewise.training.persons import Persons

OWNERS = np.array([5, 9, 5, 2, 9, 9, 2, 7, 9, 5, 9, 1])
RATE = 0.3


def person_plan(max_records: int = 3, clip: float = 0.5, **changes: object) -> LocalPlan:
    plan = make_test_plan(n=8, batch=5, steps=3, clip=clip, z=0.3)
    return replace(plan, unit="person", max_records=max_records, **changes)


def case(name: str) -> tuple[nn.Module, TensorData, Tensor]:
    generator = torch.Generator().manual_seed(3)
    model: nn.Module = {
        "linear": lambda: nn.Linear(7, 4),
        "network": lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)),
        "convolution": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 4)
        ),
    }[name]()
    inputs = torch.randn(len(OWNERS), 7, generator=generator)
    targets = torch.randint(0, 4, (len(OWNERS),), generator=generator)
    theta = 0.5 * torch.randn(theta_of(model, torch.float32).shape, generator=generator)
    return model, TensorData(inputs, targets, Persons.of(OWNERS)), theta


def loop(model: nn.Module, data: TensorData, theta: Tensor, plan: LocalPlan) -> Tensor:
    """DP-SGD in float64 with one backward pass for each record and one vector for each person."""
    assert data.persons is not None
    rng, point = seeded(), theta.double()
    for step in range(plan.steps_per_round):
        total = torch.from_numpy(rng.normal(step, len(point))).double() * plan.noise_std
        for records in data.persons.sample(step, plan, rng):
            rows = single_gradients(
                model, point, data.tensor[records].double(), data.targets[records], cross_entropy
            )
            mean = rows.mean(0)
            if plan.clip_rule == "normalise":
                mean *= plan.clip_norm / (mean.norm() + NORMALISE_GAMMA)
            elif plan.clip_norm is not None:
                mean *= min(1.0, plan.clip_norm / float(mean.norm()))
            total += mean
        point = point - RATE / plan.expected_batch * total
    return point - theta.double()


def agree(one: Tensor, other: Tensor) -> None:
    assert float((one - other).norm()) <= 1e-5 * float(other.norm())


PLANS = {
    "clips": person_plan(clip=0.2),
    "clips nobody": person_plan(clip=1e4, noise_multiplier=1e-4),
    "one record": person_plan(max_records=1),
    "all records": person_plan(max_records=100),
    "normalises": person_plan(clip_rule="normalise"),
    "no privacy": person_plan(clip_norm=None, noise_multiplier=0.0, budget=None),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", ["linear", "network", "convolution"])
def test_updates_agree_with_a_loop_over_persons(name: str, plan: LocalPlan) -> None:
    model, data, theta = case(name)
    expected = loop(model, data, theta, plan)
    for isolate in (True, False):
        engine = make_engine(model, cross_entropy, isolate=isolate)
        rng = seeded()
        found = local_update(model, theta, data, plan, RATE, cross_entropy, rng, engine=engine)
        agree(found.delta, expected)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_closed_form_of_heads_agrees_with_a_loop(plan: LocalPlan) -> None:
    model, data, theta = case("linear")
    head = head_of(model, cross_entropy)
    assert head is not None
    records = HeadRecords.of(head, data)
    assert records is not None
    expected = loop(model, data, theta, plan)
    louder = plan if plan.budget is None else replace(plan, noise_multiplier=0.9)
    rates = [RATE, 2 * RATE]
    updates = head_updates(head, [theta, theta], records, [plan, louder], rates, seeded())
    agree(updates[0], expected)
    agree(updates[0], head_updates(head, [theta], records, [plan], [RATE], seeded())[0])


@pytest.mark.parametrize("name", ["linear", "network"])
def test_one_record_each_is_record_level(name: str) -> None:
    model, data, theta = case(name)
    alone = replace(data, persons=Persons.of(np.arange(len(data))[::-1].copy()))
    plan = person_plan(clip=0.2)
    records = replace(plan, unit="record", max_records=None)
    one, other = (
        local_update(model, theta, alone, each, RATE, cross_entropy, seeded()).delta
        for each in (plan, records)
    )
    agree(one, other)


@pytest.mark.parametrize("name", ["linear", "network"])
@pytest.mark.parametrize("isolate", [True, False])
def test_a_bad_record_adds_nothing_to_the_mean_of_its_person(name: str, isolate: bool) -> None:
    model, data, theta = case(name)
    bad = data.tensor.clone()
    bad[2] = torch.nan
    broken = replace(data, inputs=bad)
    plan = person_plan(max_records=100, clip=1e4, noise_multiplier=1e-6, sample_rate=1.0)
    plan = replace(plan, steps_per_round=1)
    engine = make_engine(model, cross_entropy, isolate=isolate)

    def update(data: TensorData) -> Tensor:
        rng = seeded()
        return local_update(model, theta, data, plan, 1.0, cross_entropy, rng, engine=engine).delta

    gradients = single_gradients(model, theta, data.tensor, data.targets, cross_entropy)
    agree(update(data) - update(broken), -gradients[2] / 3 / plan.expected_batch)


@pytest.mark.parametrize("rule", ["norm", "normalise"])
@pytest.mark.parametrize("huge", [1e30, -1e30])
def test_a_person_whose_sum_overflows_adds_nothing(huge: float, rule: str) -> None:
    """Float32 products that overflow to infinities of both signs have a norm that is NaN."""
    model = nn.Linear(7, 1)
    inputs = torch.randn(len(OWNERS), 7, generator=torch.Generator().manual_seed(3))
    targets = torch.zeros(len(OWNERS), 1)
    theta = torch.zeros(8)
    inputs[2], targets[2] = huge, 1e30
    inputs[6], targets[6] = huge, -1e30
    persons = np.arange(len(OWNERS))
    persons[6] = 2
    head = head_of(model, mse_loss)
    assert head is not None
    plan = person_plan(max_records=100, sample_rate=1.0, clip_rule=rule)
    plan = replace(plan, steps_per_round=1)

    def update(chosen: np.ndarray) -> Tensor:
        owners = Persons.of(persons[chosen])
        records = HeadRecords.of(head, TensorData(inputs[chosen], targets[chosen], owners))
        assert records is not None
        return head_updates(head, [theta], records, [plan], [RATE], seeded())[0]

    others = update(np.flatnonzero(persons != 2))
    agree(update(np.arange(len(OWNERS))), others)


def test_a_record_that_makes_the_loss_fail_is_left_out_alone() -> None:
    model, data, theta = case("network")
    plan = person_plan(max_records=100, sample_rate=1.0)
    targets = data.targets.clone()
    targets[2] = 77  # no class
    deltas = []
    for broken in (replace(data, targets=targets), replace(data, inputs=data.tensor.clone())):
        if broken.targets is data.targets:
            broken.tensor[2] = torch.nan
        deltas.append(local_update(model, theta, broken, plan, RATE, cross_entropy, seeded()).delta)
    agree(*deltas)


def test_a_plan_for_persons_needs_persons() -> None:
    model, data, theta = case("linear")
    unknown = replace(data, persons=None)
    with pytest.raises(InvalidValueError, match=r"data\.persons"):
        local_update(model, theta, unknown, person_plan(), RATE, cross_entropy, seeded())
    head = head_of(model, cross_entropy)
    assert head is not None
    records = HeadRecords.of(head, unknown)
    assert records is not None
    with pytest.raises(InvalidValueError, match=r"data\.persons"):
        head_updates(head, [theta], records, [person_plan()], [RATE], seeded())


def test_data_without_records_give_noise_alone() -> None:
    model, data, theta = case("network")
    nobody = data.without_records()
    assert nobody.persons is not None
    assert len(nobody) == len(nobody.persons) == 0
    delta = local_update(model, theta, nobody, person_plan(), RATE, cross_entropy, seeded()).delta
    assert float(delta.norm()) > 0


# ---------------------------------------------------------------- sampling


def test_persons_are_grouped_in_the_order_of_their_first_records() -> None:
    persons = Persons.of(OWNERS)
    expected = [np.flatnonzero(owner == OWNERS).tolist() for owner in (5, 9, 2, 7, 1)]
    assert [persons.of_person(number).tolist() for number in range(len(persons))] == expected
    assert len(Persons.of(np.empty(0, np.int64))) == 0


@pytest.mark.parametrize("owners", [np.array([0.5, 1.0]), np.zeros((2, 2), np.int64)])
def test_persons_are_whole_numbers(owners: np.ndarray) -> None:
    with pytest.raises(InvalidValueError, match="persons"):
        Persons.of(owners)


@pytest.mark.parametrize("secure", [True, False])
def test_every_subset_of_a_persons_records_is_equally_likely(secure: bool) -> None:
    plan = person_plan(max_records=2, sample_rate=1.0)
    persons = Persons.of(np.array([1, 1, 0, 1, 1]))
    draws = 1200
    counts = dict.fromkeys(combinations([0, 1, 3, 4], 2), 0)
    for step in range(draws):
        source = SecureRandom() if secure else SeededRandom(0, 1, "a")
        one, other = persons.sample(step, plan, source)
        counts[tuple(one.tolist())] += 1
        assert other.tolist() == [2]
    # 6 subsets, binomial deviation 12.9: 6 deviations are exceeded once in 1e8 runs
    assert all(abs(count - draws / 6) < 78 for count in counts.values())


def test_a_persons_choice_does_not_depend_on_the_others() -> None:
    plan = person_plan(max_records=2, sample_rate=1.0)
    few, many = np.array([3, 3, 3, 3]), np.array([3, 3, 3, 3, 8, 8, 8])
    for step in range(20):
        alone = next(iter(Persons.of(few).sample(step, plan, seeded())))
        assert next(iter(Persons.of(many).sample(step, plan, seeded()))).tolist() == alone.tolist()


def test_persons_are_poisson_sampled() -> None:
    plan = person_plan(max_records=1, sample_rate=0.2)
    persons = Persons.of(np.repeat(np.arange(400), 3))
    sizes = [len(list(persons.sample(step, plan, SecureRandom()))) for step in range(200)]
    # shuffled batches have variance 0; 6 deviations of mean and variance over 200 draws
    assert abs(np.mean(sizes) - 80) < 6 * (64 / 200) ** 0.5
    assert abs(np.var(sizes) / 64 - 1) < 6 * (2 / 200) ** 0.5


# ---------------------------------------------------------------- specs and plans


def test_the_plan_of_persons_costs_what_that_of_records_costs() -> None:
    settings = {"n_examples": 200, "batch_size": 20, "epsilon": 2.0, "delta": 1e-4}
    persons = ClientSpec("a", **settings, unit="person", max_records=4)  # type: ignore[arg-type]
    records = ClientSpec("a", **settings)  # type: ignore[arg-type]
    one, other = (make_plan(spec, rounds=3, clip_norm=1.0) for spec in (persons, records))
    assert (one.unit, one.max_records, other.unit) == ("person", 4, "record")
    assert replace(one, unit="record", max_records=None) == other


@pytest.mark.parametrize(
    ("unit", "max_records", "field"),
    [("people", None, "unit"), ("person", None, "max_records"), ("person", 0, "max_records"),
     ("person", True, "max_records"), ("record", 3, "max_records")],
)  # fmt: skip
def test_units_that_make_no_sense(unit: str, max_records: int | None, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        ClientSpec("a", 10, 2, 1.0, 1e-4, unit=unit, max_records=max_records)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=field):
        replace(make_test_plan(), unit=unit, max_records=max_records)
