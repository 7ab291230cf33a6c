"""The fields of a site's own file: ledger, data, model, budget, training, limits and options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from noisewise.data.specs import Unit, check_unit
from noisewise.errors import InvalidValueError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT
from noisewise.schema import Count, OpenShare, Positive, Strict
from noisewise.site.site_features import FeaturesPart
from noisewise.site.site_task import InputPart, TaskPart
from noisewise.site.vault_config import VaultPart
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH

__all__ = [
    "BudgetPart",
    "DataPart",
    "DeclarationPart",
    "LedgerPart",
    "LimitsPart",
    "MetricsPart",
    "ModelPart",
    "SiteConfig",
    "TrainingPart",
]


class LedgerPart(Strict):
    """Where the ledger is, and of which dataset."""

    file: str
    dataset: str
    keep_replies: Count | None = None


class DataPart(Strict):
    """The records: a file with ``inputs`` and ``targets``, or a function that returns both.

    The function takes no argument and returns a pair of arrays, a pair of lists, or a torch
    ``Dataset``. In a list or a ``Dataset``, a bad record is left out alone.

    In a CSV file, ``target`` is the column with the class. ``held_out`` is a second file, with
    records that are not trained on; without it they are ``test_inputs`` and ``test_targets`` of
    ``file``. They are read for ``[metrics]`` only.

    Inputs of type uint8 for a model that takes float32 need a declaration: ``images = true``
    divides them by 255, ``images = false`` keeps the numbers.

    ``records`` is the number that the plan counts on. It is written down here, not counted, so that
    steps, sampling rate and noise do not depend on whether one record is there.

    With ``budget.unit = "person"``, ``persons`` is this number instead, and ``person`` is the
    column of a CSV file, or the array of another one, that says whose record each one is. It is no
    input. A function returns it as a third value, and ``person`` is then for ``held_out`` only.
    """

    records: Count | None = None
    persons: Count | None = None
    file: str | None = None
    function: str | None = None
    target: str = "target"
    person: str | None = None
    held_out: str | None = None
    images: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DataPart:
        if (self.file is None) == (self.function is None):
            allowed = f"must be given, or data.function, but not both ({self.function!r})"
            raise InvalidValueError("data.file", self.file, allowed)
        return self


class ModelPart(Strict):
    """The model that the site is willing to train; with ``[features]``, the head on them.

    ``input_dtype = "int64"`` is for ids, from 0 to ``vocabulary`` - 1. A model that takes several
    arrays by name has ``[model.inputs.NAME]`` tables instead of ``input_shape``.
    """

    name: str
    input_shape: list[Count] | None = None
    input_dtype: Literal["float32", "int64"] = "float32"
    vocabulary: Count | None = None
    inputs: dict[str, InputPart] | None = None
    classes: Count
    options: dict[str, Any] = Field(default_factory=dict)


class BudgetPart(Strict):
    """The privacy budget of each record, or of each person; it cannot be changed later.

    A step uses at most ``max_records`` records of a person, chosen at random.
    """

    unit: Unit = "record"
    max_records: Count | None = None

    epsilon: Positive
    delta: OpenShare
    planned_rounds: Count
    accountant: str = DEFAULT_ACCOUNTANT

    @model_validator(mode="after")
    def _known_unit(self) -> BudgetPart:
        check_unit(self.unit, self.max_records, "budget.")
        return self


class TrainingPart(Strict):
    """How the site trains. ``normalise`` divides the update by its number of steps (NoiseWise).

    ``clip`` is the site's own clipping rule, see `LocalPlan`; no server can set it.
    """

    batch_size: Count
    clip_norm: Positive
    clip: Literal["norm", "normalise"] = "norm"
    local_epochs: Count = 1
    normalise: bool = False
    physical_batch: Count = DEFAULT_PHYSICAL_BATCH
    threads: Count = 1
    loss: str | None = None


class MetricsPart(Strict):
    """A noised score on held-out records, for servers that ask; without this part there is none.

    A record scores from 0 to 1 (`noisewise.training.bounded_scores`); in a classification, 1 if the
    model gets it right. ``score_bound`` is required for a regression: the absolute error from which
    on a record scores 0. ``noise_multiplier`` is the deviation of the noise on the sum of scores,
    which one record changes by at most 1. ``records`` is the divisor: written down, not
    counted, so that it tells nothing. For the same reason no minimum is checked against the true
    number of records. If the budget protects persons, one record of each is scored, so ``records``
    is a number of persons. ``releases`` is how often in all; training gets so much more noise that
    its planned rounds and these fit into the budget together.
    """

    noise_multiplier: Positive
    records: Count
    releases: Count
    score_bound: Positive | None = None

    @model_validator(mode="after")
    def _worth_it(self) -> MetricsPart:
        if self.records < 4 * self.noise_multiplier:
            least = f"at least 4 noise_multiplier = {4 * self.noise_multiplier:g}"
            allowed = f"must be {least}; otherwise the noise dominates"
            raise InvalidValueError("metrics.records", self.records, allowed)
        return self


class DeclarationPart(Strict):
    """Whether servers that ask receive the unit and the budget; without this part they do not.

    ``publish = true`` sends unit, epsilon and delta, as ``[budget]`` has them. It is unsigned.
    """

    publish: bool


class LimitsPart(Strict):
    """What a server may ask for.

    ``rounds`` is how many rounds of the plan are ever charged, whatever the budget would allow;
    without it, the planned ones. ``last_round`` bounds the number that a server gives a round.
    """

    learning_rate: Annotated[list[Positive], Field(min_length=2, max_length=2)]
    rounds: Count | None = None
    last_round: Count = 100_000

    @model_validator(mode="after")
    def _ordered(self) -> LimitsPart:
        if self.learning_rate[0] > self.learning_rate[1]:
            allowed = "must be [lowest, highest]"
            raise InvalidValueError("limits.learning_rate", self.learning_rate, allowed)
        return self


class SiteConfig(Strict):
    """The whole file.

    ``columns`` declares how the columns of CSV files become inputs (`noisewise.data.columns`),
    ``features`` which public map is applied to each record before training, ``vault`` whom
    `noisewise site serve` answers.
    """

    ledger: LedgerPart
    data: DataPart
    columns: dict[str, Any] | None = None
    features: FeaturesPart | None = None
    task: TaskPart = TaskPart()
    model: ModelPart
    budget: BudgetPart
    training: TrainingPart
    limits: LimitsPart
    metrics: MetricsPart | None = None
    declaration: DeclarationPart | None = None
    vault: VaultPart | None = None

    @property
    def declared_units(self) -> int:
        """The declared number of records, or of persons if the budget protects persons."""
        data = self.data
        declared = data.records if self.budget.unit == "record" else data.persons
        assert declared is not None  # `_one_unit`
        return declared

    @model_validator(mode="after")
    def _one_unit(self) -> SiteConfig:
        data, unit = self.data, self.budget.unit
        needed, other = ("records", "persons") if unit == "record" else ("persons", "records")
        if getattr(data, needed) is None:
            allowed = f'must be given: the plan counts {needed}, because budget.unit = "{unit}"'
            raise InvalidValueError(f"data.{needed}", None, allowed)
        if getattr(data, other) is not None:
            allowed = f'must be left out with budget.unit = "{unit}"; use data.{needed}'
            raise InvalidValueError(f"data.{other}", getattr(data, other), allowed)
        if unit == "record" and data.person is not None:
            allowed = 'must be left out with budget.unit = "record"'
            raise InvalidValueError("data.person", data.person, allowed)
        if unit == "person" and data.person is None and (data.file or data.held_out):
            allowed = "must name the column or array that says whose record each one is"
            raise InvalidValueError("data.person", None, allowed)
        return self
