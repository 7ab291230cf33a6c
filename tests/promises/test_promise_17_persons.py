"""Guarantee 17 of docs/privacy.md: a budget that protects persons, at a site.

Neighbours differ by all records of one person. A fault of one record removes that record alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dpsgd import make_test_plan, product_loss, seeded
from site_cases import METRICS, make_site, protect_persons
from torch import Tensor, nn

from noisewise.errors import InvalidValueError
from noisewise.privacy import LocalPlan
from noisewise.privacy.declaration import Declaration
from noisewise.privacy.ledger import Ledger, read_refusals
from noisewise.randomness import SecureRandom
from noisewise.site.interface import answer_declaration, answer_instruction, answer_question
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_file import load_site
from noisewise.site.site_persons import one_record_each
from noisewise.training import TensorData, local_update, make_engine, make_model
from noisewise.training.bounded_scores import SCORE_UNITS, bounded_score
from noisewise.training.gradients import GradientEngine
from noisewise.training.persons import Persons, add_person
from noisewise.training.score_sum import Answers
from noisewise.training.tasks import CLASSIFICATION

CLIP = 0.5
SIZES = [10.0**k for k in range(-8, 9)]

# ---------------------------------------------------------------- sensitivity, by brute force

Add = Callable[..., None]


def sizes_case(name: str) -> tuple[nn.Module, Tensor, TensorData]:
    """Persons with one to four records, whose gradients have sizes from 1e-8 to 1e8."""
    generator = torch.Generator().manual_seed(5)
    counts = [1 + person % 4 for person in range(len(SIZES))]
    owners = torch.randperm(sum(counts), generator=generator).numpy()
    owners = np.repeat(np.arange(len(SIZES)), counts)[owners]
    if name == "linear":
        model: nn.Module = nn.Linear(15, 1)
        inputs, width = torch.randn(len(owners), 15, generator=generator), 1
    else:
        model = make_model(name, (1, 8, 8), 3, seed=0)
        inputs, width = torch.randn(len(owners), 1, 8, 8, generator=generator), 3
    scale = torch.tensor(SIZES)[owners][:, None] * torch.rand(len(owners), 1, generator=generator)
    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return model, theta, TensorData(inputs, scale.expand(-1, width).clone(), Persons.of(owners))


def subset(data: TensorData, keep: np.ndarray) -> TensorData:
    assert data.persons is not None
    return TensorData(data.tensor[keep], data.targets[keep], data.persons.take(keep))


def sum_of(add: Add, engine: GradientEngine, theta: Tensor, data: TensorData) -> Tensor:
    """The sum of the bounded contributions of all persons."""
    plan = replace(make_test_plan(clip=CLIP), unit="person", max_records=4)
    total, scratch = torch.zeros_like(theta).double(), torch.zeros_like(theta).double()
    assert data.persons is not None
    for person in range(len(data.persons)):
        index = data.persons.of_person(person)
        own = data.tensor[index], data.targets[index]
        add(engine, theta, own, plan, 3, total, scratch)
    return total


def check_sensitivity(add: Add, name: str, isolate: bool = True) -> None:
    model, theta, data = sizes_case(name)
    engine = make_engine(model, product_loss, isolate=isolate)
    everyone = sum_of(add, engine, theta, data)
    assert data.persons is not None
    moves = []
    for person in range(len(data.persons)):
        others = subset(data, data.persons.owners != person)
        moves.append(float((everyone - sum_of(add, engine, theta, others)).norm()))
    assert max(moves) <= CLIP * (1 + 1e-6), "one person moves too much"
    # Power: some persons are clipped, others (with much smaller gradients) come through.
    assert max(moves) >= CLIP * (1 - 1e-4)
    assert 0 < min(moves) < 1e-3 * CLIP


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", ["linear", "mlp", "cnn"])
def test_one_person_moves_the_sum_by_at_most_c(name: str, isolate: bool) -> None:
    check_sensitivity(add_person, name, isolate)


def clips_each_record(
    engine: GradientEngine,
    theta: Tensor,
    records: tuple[Tensor, Tensor],
    plan: LocalPlan,
    physical_batch: int,
    total: Tensor,
    scratch: Tensor,
) -> None:
    """Planted: c bounds each record of a person, and their sum is not bounded."""
    engine.add_clipped_sum(theta, *records, plan.clip_norm, total)


def clips_each_batch(
    engine: GradientEngine,
    theta: Tensor,
    records: tuple[Tensor, Tensor],
    plan: LocalPlan,
    physical_batch: int,
    total: Tensor,
    scratch: Tensor,
) -> None:
    """Planted: the mean of each physical batch of a person is bounded, not that of all."""
    for start in range(0, len(records[1]), physical_batch):
        part = tuple(one[start : start + physical_batch] for one in records)
        add_person(engine, theta, part, plan, physical_batch, total, scratch)  # type: ignore[arg-type]


@pytest.mark.parametrize("flaw", [clips_each_record, clips_each_batch])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_planted_flaws_of_the_bound_are_seen(flaw: Add, name: str) -> None:
    with pytest.raises(AssertionError, match="one person moves too much"):
        check_sensitivity(flaw, name)


def test_persons_with_one_record_each_are_record_level() -> None:
    """With the engine of a site, at every gradient size."""
    model, theta, data = sizes_case("mlp")
    alone = replace(data, persons=Persons.of(np.arange(len(data))))
    engine = make_engine(model, product_loss)
    by_person = sum_of(add_person, engine, theta, alone)
    by_record = engine.clipped_sum(theta, data.inputs, data.targets, CLIP)
    assert float((by_person - by_record).norm()) <= 1e-5 * float(by_record.norm())


def test_a_person_contributes_the_same_bits_beside_any_others() -> None:
    model, theta, data = sizes_case("cnn")
    engine = make_engine(model, product_loss)
    assert data.persons is not None
    person = 11
    own = subset(data, data.persons.owners == person)
    alone = sum_of(add_person, engine, theta, own)
    torch.manual_seed(1)
    for hostile in (1e-8, 1.0, 1e8):
        others = TensorData(
            torch.cat([hostile * torch.randn(5, 1, 8, 8), own.tensor]),
            torch.cat([torch.ones(5, 3), own.targets]),
            Persons.of(np.array([0, 0, 1, 2, 2, *[9] * len(own)])),
        )
        assert others.persons is not None
        found = torch.zeros_like(alone)
        index = others.persons.of_person(3)
        records = others.tensor[index], others.targets[index]
        plan = replace(make_test_plan(clip=CLIP), unit="person", max_records=4)
        add_person(engine, theta, records, plan, 3, found, torch.zeros_like(alone))
        assert torch.equal(found, alone)


# ---------------------------------------------------------------- the noised score


def all_records(data: TensorData, rng: SecureRandom) -> TensorData:
    """Planted: every held-out record of a person is scored."""
    return data


def most_by_one_person(choose: Callable[..., TensorData]) -> float:
    """The largest change of the sum of scores by one person, in records."""
    model, theta, data = sizes_case("linear")
    model = nn.Linear(15, 2)
    theta = torch.randn(32, generator=torch.Generator().manual_seed(1))
    data = replace(data, targets=torch.zeros(len(data), dtype=torch.int64))
    score, answers = bounded_score(CLASSIFICATION), Answers(model)
    assert data.persons is not None
    largest = 0
    for person in range(len(data.persons)):
        keep = data.persons.owners != person
        totals = []
        for part in (data, subset(data, keep)):
            chosen = choose(part, seeded())
            totals.append(answers.score_sum(theta, chosen, score))
        largest = max(largest, abs(totals[0] - totals[1]))
    return largest / SCORE_UNITS


class OwnChoice:
    """Draws for each person what the length of their records gives, whoever the others are."""

    def record_order(self, step: int, person: int, size: int) -> np.ndarray:
        return np.roll(np.arange(size), size // 2)


def test_one_person_changes_the_sum_of_scores_by_at_most_one_record() -> None:
    fixed = lambda data, rng: one_record_each(data, OwnChoice())  # type: ignore[arg-type] # noqa: E731
    assert most_by_one_person(fixed) == 1.0
    assert most_by_one_person(all_records) > 1.0


def test_one_record_of_each_person_is_chosen_by_chance() -> None:
    owners = np.array([4, 4, 8, 4, 8, 2])
    data = TensorData(torch.arange(6.0)[:, None], torch.arange(6), Persons.of(owners))
    counts = np.zeros(6)
    for _ in range(900):
        chosen = one_record_each(data, SecureRandom())
        assert chosen.persons is not None
        assert chosen.persons.owners.tolist() == [0, 1, 2]
        assert owners[chosen.targets].tolist() == [4, 8, 2]
        assert chosen.tensor[:, 0].tolist() == chosen.targets.tolist()
        counts[chosen.targets] += 1
    expected = 900 / np.array([3, 3, 2, 3, 2, 1])
    # binomial deviation of at most 15: 6 deviations are exceeded once in 1e8 runs
    assert np.abs(counts - expected).max() < 90
    nobody = one_record_each(data.without_records(), SecureRandom())
    assert len(nobody) == 0
    with pytest.raises(InvalidValueError, match="persons"):
        one_record_each(replace(data, persons=None), SecureRandom())


# ---------------------------------------------------------------- a round at a site

MODEL = make_model("softmax", (1, 8, 8), 10, seed=0)
SENT: dict[str, Any] = {name: part.detach().numpy() for name, part in MODEL.named_parameters()}


def with_owners(site: Path, owners: Any, array: str = "persons") -> None:
    """Add an array that says whose record each one is to a site's npz file."""
    with np.load(site.parent / "records.npz") as file:
        arrays = {"inputs": file["inputs"], "targets": file["targets"]}
    np.savez(site.parent / "records.npz", **arrays, **{array: owners})


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site with 60 records of 20 persons, of whom one has 22 records."""
    file = make_site(tmp_path / "site", records=60, rounds=4, batch=10)
    with_owners(file, np.r_[np.arange(20), np.repeat([7, 11], [20, 20])])
    protect_persons(file, 20, max_records=3, column="persons")
    text = file.read_text().replace("[model]", 'held_out = "records.npz"\n\n[model]')
    text += METRICS.format(noise=5.0, records=20, releases=2)
    file.write_text(text + "\n[declaration]\npublish = true\n")
    return file


def test_a_round_at_a_site_that_protects_persons(site: Path) -> None:
    loaded = load_site(site)
    assert (loaded.plan.unit, loaded.plan.max_records) == ("person", 3)
    assert loaded.plan.sample_rate == 10 / 20
    data = loaded.data()
    assert data.persons is not None
    assert (len(data), len(data.persons), data.count("person")) == (60, 20, 20)
    first = answer_instruction(lambda: site, lambda: Instruction(1, 0.2, SENT))
    again = answer_instruction(lambda: site, lambda: Instruction(1, 0.2, SENT))
    assert first is not None
    assert again is not None
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert answer_question(lambda: site, lambda: Question(1, SENT)) is not None
    assert answer_declaration(lambda: site) == Declaration("person", 8.0, 1e-3)
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        statement = ledger.statement()
    assert statement.unit == "person"
    assert [(e.purpose, e.state) for e in statement.entries] == [
        ("training", "sealed"), ("metrics", "sealed"),
    ]  # fmt: skip


def test_persons_are_sampled_and_their_records_are_chosen(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secure generator is asked for 20 persons, and for the order of a person's records."""
    asked: list[tuple[str, int]] = []
    sample, order = SecureRandom.poisson_sample, SecureRandom.record_order

    def poisson_sample(self: SecureRandom, step: int, size: int, rate: float) -> Any:
        asked.append(("persons", size))
        return sample(self, step, size, rate)

    def record_order(self: SecureRandom, step: int, person: int, size: int) -> Any:
        asked.append(("records", size))
        return order(self, step, person, size)

    monkeypatch.setattr(SecureRandom, "poisson_sample", poisson_sample)
    monkeypatch.setattr(SecureRandom, "record_order", record_order)
    for number in (1, 2, 3, 4):
        assert answer_instruction(lambda: site, partial(Instruction, number, 0.2, SENT)) is not None
    steps = load_site(site).plan.steps_per_round
    assert asked.count(("persons", 20)) == 4 * steps
    assert set(asked) <= {("persons", 20), ("records", 21)}


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_ledger_of_the_other_unit_is_a_refusal_that_costs_nothing(site: Path, unit: str) -> None:
    if unit == "person":  # the ledger counts persons, the site's file records
        text = site.read_text().replace('unit = "person"\nmax_records = 3\n', "")
        site.write_text(text.replace('persons = 20\nperson = "persons"', "records = 60"))
    else:
        for old in site.parent.glob("site.ledger*"):
            old.unlink()
        budget = load_site(site).budget
        Ledger.create(site.parent / "site.ledger", budget, "digits-0")
    assert answer_instruction(lambda: site, lambda: Instruction(1, 0.2, SENT)) is None
    assert answer_question(lambda: site, lambda: Question(1, SENT)) is None
    [refusal] = read_refusals(site.parent / "site.ledger")
    other = "record" if unit == "person" else "person"
    assert f"unit = '{unit}', expected '{other}'" in refusal.reason
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        assert ledger.statement().entries == ()


def test_training_sees_the_same_inputs_with_and_without_persons(site: Path) -> None:
    """The column of persons is no input."""
    by_person = load_site(site).data()
    text = site.read_text().replace('unit = "person"\nmax_records = 3\n', "")
    site.write_text(text.replace('persons = 20\nperson = "persons"', "records = 60"))
    by_record = load_site(site).data()
    assert by_record.persons is None
    assert torch.equal(by_person.tensor, by_record.tensor)
    assert torch.equal(by_person.targets, by_record.targets)


def test_all_persons_together_train_as_the_plan_says(site: Path) -> None:
    """The site's records and engine, seeded, agree with a loop over persons."""
    loaded = load_site(site)
    plan = replace(loaded.plan, noise_multiplier=1e-6, steps_per_round=1, sample_rate=1.0)
    data, theta = loaded.data(), torch.zeros(650)
    engine = loaded.engine()
    found = local_update(
        loaded.model, theta, data, plan, 1.0, loaded.loss, seeded(), engine=engine
    ).delta
    assert data.persons is not None
    expected = torch.zeros(650, dtype=torch.float64)
    for records in data.persons.sample(0, plan, seeded()):
        mean = torch.zeros(650, dtype=torch.float64)
        for one in records:
            alone = data.tensor[[one]], data.targets[[one]]
            engine.add_clipped_sum(theta, *alone, None, mean)
        mean /= len(records)
        expected -= mean * min(1.0, 1.0 / float(mean.norm())) / plan.expected_batch
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())
