"""A site's own file: data, model, promise and limits. No server sees it or changes it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator
from torch import nn
from torch.nn.functional import cross_entropy

from noisewise.data.columns import ColumnCoder, parse_columns
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.plugins import load_object
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger
from noisewise.privacy.plan import LocalPlan, make_plan
from noisewise.privacy.shared_budget import plan_with_releases
from noisewise.schema import Count, OpenShare, Positive, Strict
from noisewise.site.site_features import FeaturesPart, load_features, mapped_records
from noisewise.site.site_records import (
    inputs_and_targets,
    read_records,
    sound_records,
)
from noisewise.training.features import Features
from noisewise.training.gradients import Loss
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH, TensorData
from noisewise.training.models import make_model
from noisewise.training.parameters import check_model
from noisewise.training.synthetic_records import RecordForm

__all__ = ["Site", "SiteConfig", "load_site"]


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

    ``records`` is the number that the plan counts on. It is written down here, not counted, so that
    steps, sampling rate and noise do not depend on whether one record is there.
    """

    records: Count
    file: str | None = None
    function: str | None = None
    target: str = "target"
    held_out: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DataPart:
        if (self.file is None) == (self.function is None):
            raise ValueError("give either file or function")
        return self


class ModelPart(Strict):
    """The model that the site is willing to train; with ``[features]``, the head on them."""

    name: str
    input_shape: list[Count]
    classes: Count
    options: dict[str, Any] = Field(default_factory=dict)


class BudgetPart(Strict):
    """The promise to each record, for good."""

    epsilon: Positive
    delta: OpenShare
    planned_rounds: Count
    accountant: str = DEFAULT_ACCOUNTANT


class TrainingPart(Strict):
    """How the site trains. ``normalise`` divides the update by its number of steps (NoiseWise)."""

    batch_size: Count
    clip_norm: Positive
    local_epochs: Count = 1
    normalise: bool = False
    physical_batch: Count = DEFAULT_PHYSICAL_BATCH
    threads: Count = 1
    loss: str | None = None


class MetricsPart(Strict):
    """A noised accuracy on held-out records, for servers that ask; without this part there is none.

    ``noise_multiplier`` is the deviation of the noise on the number of records that the model gets
    right, which one record changes by at most 1. ``records`` is the divisor: written down, not
    counted, so that it tells nothing. For the same reason no minimum is checked against the true
    number of records. ``releases`` is how often in all; training gets so much more noise that its
    planned rounds and these fit into the budget together.
    """

    noise_multiplier: Positive
    records: Count
    releases: Count

    @model_validator(mode="after")
    def _worth_it(self) -> MetricsPart:
        if self.records < 4 * self.noise_multiplier:
            raise ValueError("records must be at least 4 noise_multiplier: else noise dominates")
        return self


class DeclarationPart(Strict):
    """Whether servers that ask receive the unit and the budget; without this part they do not.

    ``publish = true`` sends "record", epsilon and delta, as ``[budget]`` has them. It is unsigned.
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
            raise ValueError("learning_rate must be [lowest, highest]")
        return self


class SiteConfig(Strict):
    """The whole file.

    ``columns`` declares how the columns of CSV files become inputs (`noisewise.data.columns`),
    ``features`` which public map is applied to each record before training.
    """

    ledger: LedgerPart
    data: DataPart
    columns: dict[str, Any] | None = None
    features: FeaturesPart | None = None
    model: ModelPart
    budget: BudgetPart
    training: TrainingPart
    limits: LimitsPart
    metrics: MetricsPart | None = None
    declaration: DeclarationPart | None = None


@dataclass(frozen=True)
class Site:
    """A site, ready to answer. Everything that decides its privacy comes from its own file."""

    config: SiteConfig
    folder: Path
    plan: LocalPlan
    model: nn.Module
    loss: Loss
    features: Features | None = None

    @property
    def ledger_file(self) -> Path:
        """Relative paths start at the site's file."""
        return self.folder / self.config.ledger.file

    @property
    def feature_folder(self) -> Path:
        """Where the features of its records are stored: beside the ledger, for its account only."""
        return self.ledger_file.with_name(self.ledger_file.name + "-features")

    @property
    def budget(self) -> PrivacyBudget:
        """The promise."""
        return PrivacyBudget(self.config.budget.epsilon, self.config.budget.delta)

    @property
    def rounds_allowed(self) -> int:
        """How many rounds of the plan are ever charged."""
        return self.config.limits.rounds or self.config.budget.planned_rounds

    @property
    def columns(self) -> ColumnCoder | None:
        """How the columns of its CSV files become inputs; None if they are numbers."""
        declared = self.config.columns
        return None if declared is None else parse_columns(declared)

    @property
    def record_form(self) -> RecordForm:
        """Shape and type of what the model trains on, as the file declares them."""
        shape = tuple(self.config.model.input_shape)
        return RecordForm(shape, torch.float32, (), torch.int64)

    def open_ledger(self) -> Ledger:
        """The ledger, if it is this dataset's and has this promise.

        Raises:
            LedgerError: it cannot be trusted.
        """
        return Ledger.open(
            self.ledger_file,
            dataset_id=self.config.ledger.dataset,
            budget=self.budget,
            accountant=self.config.budget.accountant,
            keep_replies=self.config.ledger.keep_replies,
        )

    def data(self) -> TensorData:
        """What to train on: records, or their features; bad ones add nothing."""
        part = self.config.data
        if part.function:
            return self._sound(*_from_function(part.function), "data")
        arrays = self._read(part.file or "", "data.file")
        return self._sound(arrays["inputs"], arrays["targets"], "data")

    def held_out(self) -> TensorData:
        """The records that are not trained on."""
        part = self.config.data
        if part.held_out:
            arrays = self._read(part.held_out, "data.held_out")
            return self._sound(arrays["inputs"], arrays["targets"], "data.held_out")
        if part.file:
            arrays = self._read(part.file, "data.file")
            if "test_inputs" in arrays:
                return self._sound(arrays["test_inputs"], arrays["test_targets"], "data (held out)")
        allowed = "must name a file, or data.file must hold test_inputs and test_targets"
        raise InvalidValueError("data.held_out", part.held_out, allowed)

    def _read(self, file: str, field: str) -> dict[str, NDArray[Any]]:
        return read_records(self.folder / file, self.config.data.target, field, self.columns)

    def _sound(self, inputs: object, targets: object, field: str) -> TensorData:
        part, features = self.config.model, self.features
        if features is None:
            return sound_records(inputs, targets, tuple(part.input_shape), part.classes, field)
        records = sound_records(inputs, targets, features.input_shape, part.classes, field)
        origin = self.config.data
        source = f"{field}: {origin.function or self.folder / (origin.file or '')}"
        return mapped_records(features, records, self.feature_folder, source, field)


def _from_function(name: str) -> tuple[Any, Any]:
    function = load_object(name, "data.function")
    if not callable(function):
        raise InvalidValueError("data.function", name, "must name a function")
    return inputs_and_targets(function(), f"data.function: {name}()")


def load_site(path: str | Path) -> Site:
    """Read a site's file, calibrate its noise, load its feature map and build its model.

    Raises:
        InvalidValueError: one line that names the field, its value and what is allowed.
        UnsupportedModelError: for BatchNorm.
    """
    file = Path(path)
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        allowed = f"must be a site's TOML file ({error})"
        raise InvalidValueError("site", str(path), allowed) from error
    try:
        config = SiteConfig.model_validate(content)
    except ValidationError as error:
        raise _first_fault(file, error) from error
    _check_columns(file, config)
    torch.set_num_threads(config.training.threads)
    features = _features(file, config)
    model = make_model(
        config.model.name,
        config.model.input_shape,
        config.model.classes,
        0,  # only the structure is used; parameters come with each instruction
        **config.model.options,
    )
    check_model(model)
    return Site(config, file.resolve().parent, _plan(config), model, _loss(config), features)


def _first_fault(file: Path, error: ValidationError) -> InvalidValueError:
    """One fault in one line; an unknown field comes first, since it may be misspelt."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    field = f"{file}: {'.'.join(str(part) for part in fault['loc']) or 'site'}"
    missing = [".".join(map(str, f["loc"])) for f in faults if f["type"] == "missing"]
    if fault["type"] == "missing":
        return InvalidValueError(field, None, "must be given")
    if fault["type"] == "extra_forbidden":
        hint = f"; {', '.join(missing)} must be given" if missing else ""
        return InvalidValueError(field, fault["input"], f"no such field in a site's file{hint}")
    return InvalidValueError(field, fault["input"], fault["msg"].removeprefix("Value error, "))


def _check_columns(file: Path, config: SiteConfig) -> None:
    """Check the declared columns before a record is read."""
    if config.columns is None:
        return
    coder = parse_columns(config.columns, f"{file}: columns")
    if config.data.function is not None:
        allowed = "must be left out: [columns] is for a CSV file in data.file"
        raise InvalidValueError(f"{file}: data.function", config.data.function, allowed)
    part = "model" if config.features is None else "features"
    shape = (config.features or config.model).input_shape
    if shape != [coder.width]:
        allowed = f"must be [{coder.width}], the number of inputs that [columns] declares"
        raise InvalidValueError(f"{file}: {part}.input_shape", shape, allowed)


def _features(file: Path, config: SiteConfig) -> Features | None:
    """The feature map, if the file names one and the model takes what it gives."""
    if config.features is None:
        return None
    features = load_features(config.features, file)
    if config.model.input_shape != [features.width]:
        allowed = f"must be [{features.width}], the number of features that {features.name} gives"
        raise InvalidValueError(f"{file}: model.input_shape", config.model.input_shape, allowed)
    return features


def _plan(config: SiteConfig) -> LocalPlan:
    spec = ClientSpec(
        id="site",
        n_examples=config.data.records,
        batch_size=config.training.batch_size,
        epsilon=config.budget.epsilon,
        delta=config.budget.delta,
        local_epochs=config.training.local_epochs,
    )
    plan = make_plan(
        spec,
        rounds=config.budget.planned_rounds,
        clip_norm=config.training.clip_norm,
        accountant=config.budget.accountant,
    )
    part = config.metrics
    if part is None:
        return plan
    return plan_with_releases(plan, {(1.0, part.noise_multiplier): part.releases})


def _loss(config: SiteConfig) -> Loss:
    if config.training.loss is None:
        return cross_entropy
    found = load_object(config.training.loss, "training.loss")
    if not callable(found):
        raise InvalidValueError("training.loss", config.training.loss, "must name a function")
    return found
