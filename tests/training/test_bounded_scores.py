"""The score of a record: right for every task, from 0 to 1, a function of the record alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from noisewise.errors import InvalidValueError
from noisewise.training.bounded_scores import SCORE_UNITS, bounded_score
from noisewise.training.metrics import IGNORED, Metric, accuracy
from noisewise.training.tasks import TASKS, make_task

BOUND = 2.0
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "classification": ((4,), ()),
    "binary": ((1,), ()),
    "multilabel": ((6,), (6,)),
    "regression": ((3, 2), (3, 2)),
    "segmentation": ((4, 3, 5), (3, 5)),
    "language_model": ((7, 4), (7,)),
}


def records(name: str, n: int = 40, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    output, target = FORMS[name]
    outputs = scale * torch.randn((n, *output), generator=rng)
    kind = TASKS[name].targets
    if kind == "numbers":
        return outputs, torch.randn((n, *target), generator=rng)
    top = 2 if kind in ("labels", "yes_no") else 4
    targets = torch.randint(0, top, (n, *target), generator=rng)
    if kind == "places":
        targets[torch.rand(targets.shape, generator=rng) < 0.3] = IGNORED
    return outputs, targets.float() if kind == "labels" else targets


def score_of(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    bound = BOUND if name == "regression" else None
    return bounded_score(TASKS[name], bound)(outputs, targets)


def by_hand(name: str, output: Tensor, target: Tensor) -> float:
    """The score of one record, with loops over its numbers."""
    if name == "classification":
        return float(int(output.argmax()) == int(target))
    if name == "regression":
        errors = (output.double() - target.double()).abs().reshape(-1).tolist()
        return sum(1 - min(error, BOUND) / BOUND for error in errors) / len(errors)
    if name in ("binary", "multilabel"):
        pairs = zip(output.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True)
        rights = [(logit > 0) == (truth == 1) for logit, truth in pairs]
        return sum(rights) / len(rights)
    rows = output.reshape(4, -1).T if name == "segmentation" else output
    pairs = zip(rows, target.reshape(-1).tolist(), strict=True)
    rights = [int(row.argmax()) == truth for row, truth in pairs if truth != IGNORED]
    return sum(rights) / max(len(rights), 1)


@pytest.mark.parametrize("name", TASKS)
def test_a_score_is_that_of_a_loop_over_the_record(name: str) -> None:
    outputs, targets = records(name)
    found = score_of(name, outputs, targets)
    assert found.dtype == torch.int64
    assert found.shape == (len(targets),)
    for row, value in enumerate(found.tolist()):
        assert value / SCORE_UNITS == pytest.approx(
            by_hand(name, outputs[row], targets[row]), abs=2 / SCORE_UNITS
        )
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, math.inf, math.nan])
def test_a_score_is_between_0_and_1_for_any_outputs(name: str, scale: float) -> None:
    found = score_of(name, *records(name, scale=scale))
    assert int(found.min()) >= 0
    assert int(found.max()) <= SCORE_UNITS


@pytest.mark.parametrize("name", TASKS)
def test_a_score_depends_on_its_record_alone(name: str) -> None:
    outputs, targets = records(name)
    whole = score_of(name, outputs, targets)
    one_by_one = [
        score_of(name, outputs[row : row + 1], targets[row : row + 1]) for row in range(len(whole))
    ]
    assert torch.equal(whole, torch.cat(one_by_one))


def test_a_missing_or_unused_bound_and_an_own_task_are_errors() -> None:
    with pytest.raises(InvalidValueError, match=r"metrics\.score_bound.*must be given"):
        bounded_score(TASKS["regression"])
    with pytest.raises(InvalidValueError, match=r"metrics\.score_bound.*left out"):
        bounded_score(make_task("binary"), 3.0)
    own = make_task(
        "own",
        loss=lambda outputs, targets: outputs.mean(),
        metrics=[Metric("mine", contributions=accuracy)],
    )
    with pytest.raises(InvalidValueError, match="task own"):
        bounded_score(own)
