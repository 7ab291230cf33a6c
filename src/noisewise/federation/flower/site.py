"""A site's own file: data, model, promise and limits. No server sees it or changes it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn
from torch.nn.functional import cross_entropy

from noisewise.data.custom import dataset_from_arrays
from noisewise.data.examples import Examples
from noisewise.data.files import SUFFIXES, read_arrays, read_csv
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.federation.clients import to_tensors
from noisewise.plugins import load_object
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.plan import LocalPlan, make_plan
from noisewise.training.gradients import Loss
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH, TensorData
from noisewise.training.models import make_model
from noisewise.training.parameters import check_model

__all__ = ["Site", "SiteConfig", "load_site"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
OpenShare = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LedgerPart(_Strict):
    """Where the ledger is, and of which dataset."""

    file: str
    dataset: str
    keep_replies: Count | None = None


class DataPart(_Strict):
    """The records: a file with ``inputs`` and ``targets``, or a function that returns both.

    In a CSV file, ``target`` is the column with the class.

    ``records`` is the number that the plan counts on. It is written down here, not counted, so that
    steps, sampling rate and noise do not depend on whether one record is there.
    """

    records: Count
    file: str | None = None
    function: str | None = None
    target: str = "target"

    @model_validator(mode="after")
    def _one_source(self) -> DataPart:
        if (self.file is None) == (self.function is None):
            raise ValueError("give either file or function")
        return self


class ModelPart(_Strict):
    """The model that the site is willing to train."""

    name: str
    input_shape: list[Count]
    classes: Count
    options: dict[str, Any] = Field(default_factory=dict)


class BudgetPart(_Strict):
    """The promise to each record, for good."""

    epsilon: Positive
    delta: OpenShare
    planned_rounds: Count
    accountant: str = DEFAULT_ACCOUNTANT


class TrainingPart(_Strict):
    """How the site trains. ``normalise`` divides the update by its number of steps (NoiseWise)."""

    batch_size: Count
    clip_norm: Positive
    local_epochs: Count = 1
    normalise: bool = False
    physical_batch: Count = DEFAULT_PHYSICAL_BATCH
    threads: Count = 1
    loss: str | None = None


class LimitsPart(_Strict):
    """What a server may ask for."""

    learning_rate: Annotated[list[Positive], Field(min_length=2, max_length=2)]
    last_round: Count = 100_000

    @model_validator(mode="after")
    def _ordered(self) -> LimitsPart:
        if self.learning_rate[0] > self.learning_rate[1]:
            raise ValueError("learning_rate must be [lowest, highest]")
        return self


class SiteConfig(_Strict):
    """The whole file."""

    ledger: LedgerPart
    data: DataPart
    model: ModelPart
    budget: BudgetPart
    training: TrainingPart
    limits: LimitsPart


@dataclass(frozen=True)
class Site:
    """A site, ready to answer. Everything that decides its privacy comes from its own file."""

    config: SiteConfig
    folder: Path
    plan: LocalPlan
    model: nn.Module
    loss: Loss

    @property
    def ledger_file(self) -> Path:
        """Relative paths start at the site's file."""
        return self.folder / self.config.ledger.file

    @property
    def budget(self) -> PrivacyBudget:
        """The promise."""
        return PrivacyBudget(self.config.budget.epsilon, self.config.budget.delta)

    def data(self) -> TensorData:
        """The records, of the shape that the model takes."""
        part, shape = self.config.data, tuple(self.config.model.input_shape)
        records = _from_function(part) if part.function else self._from_file()
        found = tuple(records.inputs.shape[1:])
        if found != shape:
            raise InvalidValueError("data", f"records of shape {found}", f"must be {shape}")
        if int(records.targets.max()) >= self.config.model.classes:
            raise InvalidValueError(
                "data", int(records.targets.max()), f"must be below {self.config.model.classes}"
            )
        return to_tensors(records)

    def _from_file(self) -> Examples:
        """Nothing is held out here: what is not to be trained on stands in ``test_`` arrays."""
        part = self.config.data
        path = self.folder / (part.file or "")
        if path.suffix not in SUFFIXES or not path.is_file():
            raise InvalidValueError("data.file", str(path), f"must be a file, one of {SUFFIXES}")
        arrays = read_csv(path, part.target) if path.suffix == ".csv" else read_arrays(path)
        return dataset_from_arrays(arrays["inputs"], arrays["targets"]).train


def _from_function(part: DataPart) -> Examples:
    made = load_object(part.function or "", "data.function")
    if not callable(made):
        raise InvalidValueError("data.function", part.function, "must name a function")
    inputs, targets = made()
    return dataset_from_arrays(inputs, targets).train


def load_site(path: str | Path) -> Site:
    """Read a site's file, calibrate its noise and build its model.

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
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "site"
        raise InvalidValueError(f"{file}: {field}", first["input"], first["msg"]) from error
    torch.set_num_threads(config.training.threads)
    model = make_model(
        config.model.name,
        config.model.input_shape,
        config.model.classes,
        0,  # only the structure is used; parameters come with each instruction
        **config.model.options,
    )
    check_model(model)
    return Site(config, file.resolve().parent, _plan(config), model, _loss(config))


def _plan(config: SiteConfig) -> LocalPlan:
    spec = ClientSpec(
        id="site",
        n_examples=config.data.records,
        batch_size=config.training.batch_size,
        epsilon=config.budget.epsilon,
        delta=config.budget.delta,
        local_epochs=config.training.local_epochs,
    )
    return make_plan(
        spec,
        rounds=config.budget.planned_rounds,
        clip_norm=config.training.clip_norm,
        accountant=config.budget.accountant,
    )


def _loss(config: SiteConfig) -> Loss:
    if config.training.loss is None:
        return cross_entropy
    found = load_object(config.training.loss, "training.loss")
    if not callable(found):
        raise InvalidValueError("training.loss", config.training.loss, "must name a function")
    return found
