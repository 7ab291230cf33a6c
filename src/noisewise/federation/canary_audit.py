"""The canary audit: train on known records by a client's real code path, then look for them.

Each run is a small deployment: a ledger with just enough budget, an instruction, a reservation,
local DP-SGD with the operating system's randomness, a sealed reply. The scores are computed from
the bytes of that reply, which is all that a server receives. A canary is a record or, if the
audited budget protects persons, a person with several records.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor, nn

from noisewise.checks import fraction, positive_int, positive_number
from noisewise.data.specs import Unit, check_unit_name
from noisewise.errors import BudgetSpentError, InvalidValueError, LedgerError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT, epsilon_of
from noisewise.privacy.audit_bound import AuditBound, audit_bound
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger, SealedReply, instruction_hash
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SecureRandom
from noisewise.training.local import LocalUpdate, TensorData, local_update
from noisewise.training.persons import Persons

__all__ = ["AuditResult", "Canaries", "Update", "make_canaries", "run_audit"]

Update = Callable[..., LocalUpdate]
"""`local_update`, or a function to test in its place."""

_TOO_LARGE = 10.0
"""A canary's gradient before clipping, in units of the clipping norm."""

_THRESHOLDS = (0.5, _TOO_LARGE / 2)
"""Fixed midpoints of the scores: with correct clipping, and without any clipping."""

_LEARNING_RATE = 0.5
_DATASET = "canaries"


@dataclass(frozen=True)
class Canaries:
    """Records and a network for which the gradients of no two records overlap.

    Record j has the gradient 10 c (e_j + e_j') / sqrt(2), with e_j in the first layer and e_j' in
    the second. Flat clipping shrinks it to norm c, clipping by layers only to c sqrt(2); without
    clipping its norm is 10 c.

    Attributes:
        model: two linear layers.
        theta: [p] the parameters with these gradients.
        data: one record for each canary.
        first: coordinate of e_j in theta.
        second: coordinate of e_j' in theta.
    """

    model: nn.Module
    theta: Tensor
    data: TensorData
    first: NDArray[np.int64]
    second: NDArray[np.int64]

    def scores(self, delta: Tensor, expected_batch: int, clip_norm: float) -> NDArray[np.float64]:
        """The score -(delta_j + delta_j') / sqrt(2) * b / (lr c) of each canary j.

        It is normal with deviation z, and its mean is 1 if the canary was present, else 0.
        """
        change = delta.double().numpy()
        both = change[self.first] + change[self.second]
        result: NDArray[np.float64] = (
            -both / np.sqrt(2) * expected_batch / (_LEARNING_RATE * clip_norm)
        )
        return result


def product_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient with respect to the outputs is the targets."""
    return (outputs * targets).sum(dim=1).mean()


def make_canaries(count: int, clip_norm: float) -> Canaries:
    """Make canaries for a network of two layers, of which the second is the identity.

    Record j is e_j. The first layer maps it to hidden unit b(j), and the loss depends on output
    a(j) only. So the first layer's gradient is nonzero at (a, j) only, the second's at (a, b) only,
    and no two records share the pair (a, b).

    Args:
        count: number of canaries.
        clip_norm: c of the plan.
    """
    positive_int("canaries", count)
    width = int(np.ceil(np.sqrt(count)))
    model = nn.Sequential(nn.Linear(count, width, bias=False), nn.Linear(width, width, bias=False))
    record = np.arange(count)
    seen, sent = record // width, record % width  # a(j), b(j)
    into = torch.zeros(width, count)
    into[sent, record] = 1.0
    targets = torch.zeros(count, width)
    targets[record, seen] = _TOO_LARGE * clip_norm / float(np.sqrt(2))
    return Canaries(
        model=model,
        theta=torch.cat([into.reshape(-1), torch.eye(width).reshape(-1)]),
        data=TensorData(torch.eye(count), targets),
        first=seen * count + record,
        second=width * count + seen * width + sent,
    )


@dataclass(frozen=True)
class AuditResult:
    """Result of a canary audit.

    Attributes:
        claimed: epsilon that the ledger computes from its entries.
        bound: lower bound of epsilon that the guesses prove.
        noise_multiplier: z of the plan.
        canaries: number of canaries in each run.
        runs: number of runs.
        present: scores of canaries that were trained on.
        absent: scores of those that were not.
        accountant: of the claim.
        unit: what the claim protects, a record or a person; a canary is one of them.
        records_per_person: records of a canary; 1 for the unit "record".
    """

    claimed: float
    bound: AuditBound
    noise_multiplier: float
    canaries: int
    runs: int
    present: tuple[float, ...]
    absent: tuple[float, ...]
    accountant: str
    unit: Unit = "record"
    records_per_person: int = 1

    @property
    def violated(self) -> bool:
        """Whether the guesses disprove the claimed epsilon."""
        return self.bound.epsilon > self.claimed

    def summary(self) -> dict[str, Any]:
        """The values without the scores, for JSON."""
        fields = asdict(self)
        del fields["present"], fields["absent"]
        return {**fields, "violated": self.violated}


def run_audit(
    *,
    runs: int = 4,
    canaries: int = 1000,
    noise_multiplier: float = 1.0,
    delta: float = 1e-5,
    clip_norm: float = 1.0,
    accountant: str = DEFAULT_ACCOUNTANT,
    unit: Unit = "record",
    records_per_person: int = 3,
    update: Update = local_update,
    folder: Path | None = None,
) -> AuditResult:
    """Audit the path from plan to reply: q = 1, one step, each canary present with probability 1/2.

    With persons, a canary is a person with ``records_per_person`` records, each with the gradient
    of the canary, of which a step uses all but one (if there are several).

    Args:
        runs: independent runs, each with a ledger of its own.
        canaries: records of a run, or persons.
        noise_multiplier: z of the plan.
        delta: of the claim.
        clip_norm: c of the plan.
        accountant: of the claim.
        unit: what the audited budget protects, "record" or "person".
        records_per_person: records of each person; only for the unit "person".
        update: trains one round; a deployed client uses `local_update`.
        folder: where the ledgers are kept; a temporary folder by default.

    Raises:
        InvalidValueError: an argument is out of range, or all canaries were present or absent.
        LedgerError: the ledger granted more than its budget or charged a round twice.
    """
    positive_int("runs", runs)
    positive_number("noise_multiplier", noise_multiplier)
    positive_number("clip_norm", clip_norm)
    fraction("delta", delta, one_allowed=False)
    check_unit_name(unit)
    copies = positive_int("records_per_person", records_per_person) if unit == "person" else 1
    budget = PrivacyBudget(epsilon_of(1.0, noise_multiplier, 1, delta, accountant), delta)
    plan = LocalPlan(1.0, canaries, 1, clip_norm, noise_multiplier, 1, accountant, budget)
    if unit == "person":
        plan = replace(plan, unit=unit, max_records=max(1, copies - 1))
    canary_set = make_canaries(canaries, clip_norm)
    present, absent, claimed = [], [], 0.0
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(runs):
            path = (folder or Path(temporary)) / f"audit-{number + 1}.ledger"
            Ledger.create(path, budget, _DATASET, accountant, unit=unit)
            chosen = SecureRandom().poisson_sample(0, canaries, 0.5)
            scores, spent = _one_run(path, canary_set, np.tile(chosen, copies), plan, update)
            is_present = np.zeros(canaries, dtype=bool)
            is_present[chosen] = True
            present.append(scores[is_present])
            absent.append(scores[~is_present])
            claimed = max(claimed, spent)
    present_scores, absent_scores = np.concatenate(present), np.concatenate(absent)
    if not len(present_scores) or not len(absent_scores):
        raise InvalidValueError("canaries", canaries, "too few: all were present, or all absent")
    return AuditResult(
        claimed=claimed,
        bound=audit_bound(present_scores, absent_scores, delta, thresholds=_THRESHOLDS),
        noise_multiplier=noise_multiplier,
        canaries=canaries,
        runs=runs,
        present=tuple(present_scores.tolist()),
        absent=tuple(absent_scores.tolist()),
        accountant=accountant,
        unit=unit,
        records_per_person=copies,
    )


def _one_run(
    path: Path, canaries: Canaries, chosen: NDArray[np.int64], plan: LocalPlan, update: Update
) -> tuple[NDArray[np.float64], float]:
    """One round of a deployed client: the scores from its stored reply, and epsilon spent.

    A canary that is chosen several times is a person with as many records.
    """
    assert plan.budget is not None
    assert plan.clip_norm is not None
    index = torch.from_numpy(chosen)
    persons = Persons.of(chosen) if plan.unit == "person" else None
    data = TensorData(canaries.data.tensor[index], canaries.data.targets[index], persons)
    instruction = instruction_hash(b"audit", encode({"theta": canaries.theta}))
    with Ledger.open(path, dataset_id=_DATASET, budget=plan.budget, unit=plan.unit) as ledger:
        granted = ledger.reserve(instruction, plan)
        if isinstance(granted, SealedReply):
            raise LedgerError(f"{path}: a new ledger already has a reply")
        model, theta = canaries.model, canaries.theta
        result = update(model, theta, data, plan, _LEARNING_RATE, product_loss, SecureRandom())
        ledger.seal(granted, encode({"delta": result.delta}))
        stored = ledger.reserve(instruction, plan)
        if not isinstance(stored, SealedReply):
            raise LedgerError(f"{path}: the same instruction was charged twice")
        _check_refusal(ledger, plan)
        spent = ledger.statement().spent
    delta = decode(stored.reply)["delta"]
    return canaries.scores(delta, plan.expected_batch, plan.clip_norm), spent


def _check_refusal(ledger: Ledger, plan: LocalPlan) -> None:
    """Check that the ledger refuses a second round: its budget is for one."""
    try:
        ledger.reserve(instruction_hash(b"audit", b"once more"), plan)
    except BudgetSpentError:
        return
    raise LedgerError(f"{ledger.path}: granted more than its budget")
