"""What a site's own file says and what is made from it. No server sees it or changes it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn

from noisewise.data.columns import ColumnCoder, parse_columns
from noisewise.data.record_files import joined_inputs
from noisewise.data.specs import ClientSpec, Unit
from noisewise.errors import InvalidValueError
from noisewise.plugins import load_object
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger
from noisewise.privacy.plan import LocalPlan, make_plan
from noisewise.privacy.shared_budget import plan_with_releases
from noisewise.schema import first_invalid_value
from noisewise.site.core_files import running_software
from noisewise.site.site_config import SiteConfig
from noisewise.site.site_features import load_features, mapped_records
from noisewise.site.site_persons import read_persons
from noisewise.site.site_records import (
    inputs_and_targets,
    read_records,
    usable_records,
)
from noisewise.site.site_task import (
    InputPart,
    RecordRules,
    check_site_outputs,
    site_task,
)
from noisewise.site.vault_config import RoundLimit, check_shares, round_limit
from noisewise.training.bounded_scores import RecordScore, bounded_score
from noisewise.training.engine import IsolatedGradients
from noisewise.training.features import Features
from noisewise.training.gradients import Loss
from noisewise.training.local import TensorData
from noisewise.training.models import make_model
from noisewise.training.parameters import check_model
from noisewise.training.synthetic_records import RecordForm, TensorForm
from noisewise.training.tasks import CLASSIFICATION

__all__ = ["Site", "load_site"]


@dataclass(frozen=True)
class Site:
    """A site, ready to answer. Everything that decides its privacy comes from its own file."""

    config: SiteConfig
    folder: Path
    plan: LocalPlan
    model: nn.Module
    loss: Loss
    features: Features | None = None
    rules: RecordRules = field(default_factory=lambda: RecordRules(CLASSIFICATION))
    federation: str = ""  # that a vault answers; empty without a vault

    @property
    def ledger_file(self) -> Path:
        """Relative paths start at the site's file."""
        return self.folder / self.config.ledger.file

    @property
    def feature_folder(self) -> Path:
        """The folder of its records' features: next to the ledger, closed to other accounts."""
        return self.ledger_file.with_name(self.ledger_file.name + "-features")

    @property
    def budget(self) -> PrivacyBudget:
        """The promised epsilon and delta."""
        return PrivacyBudget(self.config.budget.epsilon, self.config.budget.delta)

    @property
    def rounds_allowed(self) -> int:
        """How many rounds of the plan are ever charged."""
        return _rounds_allowed(self.config)

    @property
    def round_limit(self) -> RoundLimit:
        """How many of them this federation may have."""
        return round_limit(self.config.vault, self.federation, self.rounds_allowed)

    @property
    def score(self) -> RecordScore:
        """The score of a held-out record."""
        part = self.config.metrics
        return bounded_score(self.rules.task, None if part is None else part.score_bound)

    def engine(self) -> IsolatedGradients:
        """The engine that sums clipped gradients."""
        return IsolatedGradients(self.model, self.loss)

    @property
    def planned_steps(self) -> dict[tuple[float, float], int]:
        """All steps that are ever charged under this file, by (sample_rate, noise_multiplier)."""
        plan, metrics = self.plan, self.config.metrics
        steps = {
            (plan.sample_rate, plan.noise_multiplier): plan.steps_per_round * self.rounds_allowed
        }
        if metrics is not None:
            kind = (1.0, metrics.noise_multiplier)
            steps[kind] = steps.get(kind, 0) + metrics.releases
        return steps

    @property
    def columns(self) -> ColumnCoder | None:
        """How the columns of its CSV files become inputs; None if they are numbers."""
        declared = self.config.columns
        return None if declared is None else parse_columns(declared)

    @property
    def record_form(self) -> RecordForm:
        """Shape and type of what the model trains on, as the file declares them."""
        return self.rules.form

    def open_ledger(self) -> Ledger:
        """The ledger, if it belongs to this dataset and has this budget.

        Raises:
            LedgerError: it cannot be trusted.
        """
        return Ledger.open(
            self.ledger_file,
            dataset_id=self.config.ledger.dataset,
            budget=self.budget,
            accountant=self.config.budget.accountant,
            unit=self.config.budget.unit,
            keep_replies=self.config.ledger.keep_replies,
            software=running_software(),
        )

    def data(self) -> TensorData:
        """What to train on: records, or their features; invalid ones are left out."""
        part = self.config.data
        if part.function:
            inputs, targets, persons = _from_function(part.function, self.plan.unit)
            return self._usable(inputs, targets, persons, "data")
        arrays = self._read(part.file or "", "data.file")
        return self._usable(joined_inputs(arrays), arrays["targets"], arrays.get("persons"), "data")

    def held_out(self) -> TensorData:
        """The records that are not trained on."""
        part = self.config.data
        if part.held_out:
            arrays = self._read(part.held_out, "data.held_out")
            inputs, persons = joined_inputs(arrays), arrays.get("persons")
            return self._usable(inputs, arrays["targets"], persons, "data.held_out")
        if part.file:
            arrays = self._read(part.file, "data.file")
            if "test_targets" in arrays:
                inputs, persons = joined_inputs(arrays, "test_inputs"), arrays.get("test_persons")
                return self._usable(inputs, arrays["test_targets"], persons, "data (held out)")
        allowed = "must name a file, or data.file must hold test_inputs and test_targets"
        raise InvalidValueError("data.held_out", part.held_out, allowed)

    def _read(self, file: str, field: str) -> dict[str, NDArray[Any]]:
        data, values = self.config.data, not self.rules.task.one_class
        return read_records(
            self.folder / file, data.target, field, self.columns, values=values, person=data.person
        )

    def _usable(
        self, inputs: object, targets: object, persons: NDArray[np.int64] | None, field: str
    ) -> TensorData:
        features, images = self.features, self.config.data.images
        classes = self.config.model.classes
        persons = None if self.plan.unit == "record" else persons
        if features is None:
            return usable_records(
                inputs, targets, (), classes, field, self.rules, images=images, persons=persons
            )
        form = TensorForm(features.input_shape, torch.float32)
        rules = replace(self.rules, inputs=(form,))
        if images is None and features.input_range is not None:
            images = True  # the map declares that bytes are divided by 255
        records = usable_records(
            inputs, targets, (), classes, field, rules, images=images, persons=persons
        )
        origin = self.config.data
        source = f"{field}: {origin.function or self.folder / (origin.file or '')}"
        return mapped_records(features, records, self.feature_folder, source, field)


def _rounds_allowed(config: SiteConfig) -> int:
    return config.limits.rounds or config.budget.planned_rounds


def _from_function(name: str, unit: Unit) -> tuple[Any, Any, Any]:
    function = load_object(name, "data.function")
    if not callable(function):
        raise InvalidValueError("data.function", name, "must name a function")
    source, by_person = f"data.function: {name}()", unit == "person"
    inputs, targets, *persons = inputs_and_targets(function(), source, persons=by_person)
    return inputs, targets, read_persons(persons[0], f"{source}: persons") if persons else None


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
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"must be a site's TOML file ({reason})"
        raise InvalidValueError("site", str(path), allowed) from error
    try:
        config = SiteConfig.model_validate(content)
    except ValidationError as error:
        raise first_invalid_value(error, SiteConfig, f"{file}: ") from error
    _check_columns(file, config)
    check_shares(config.vault, _rounds_allowed(config), str(file))
    torch.set_num_threads(config.training.threads)
    features = _features(file, config)
    rules = _rules(file, config)
    shapes = {name: form.shape for name, form in zip(rules.names, rules.inputs, strict=False)}
    model = make_model(
        config.model.name,
        shapes or rules.inputs[0].shape,
        config.model.classes,
        0,  # only the structure is used; parameters come with each instruction
        **config.model.options,
    )
    check_model(model)
    check_site_outputs(rules, model)
    folder, loss = file.resolve().parent, rules.task.loss
    return Site(config, folder, _plan(config), model, loss, features, rules)


def _rules(file: Path, config: SiteConfig) -> RecordRules:
    """Which records can be trained on, from what the file declares."""
    part = config.model
    if (part.input_shape is None) == (part.inputs is None):
        allowed = "must be given, or [model.inputs.NAME] tables, but not both"
        raise InvalidValueError(f"{file}: model.input_shape", part.input_shape, allowed)
    if part.inputs is not None and (config.features or config.columns):
        allowed = "must be left out with [features] or [columns]"
        raise InvalidValueError(f"{file}: model.inputs", list(part.inputs), allowed)
    try:
        task = site_task(config.task, part.classes, _loss(config))
        if config.metrics is not None:
            bounded_score(task, config.metrics.score_bound)
    except InvalidValueError as error:
        raise InvalidValueError(f"{file}: {error.field}", error.value, error.allowed) from error
    single = InputPart(
        shape=part.input_shape or [], dtype=part.input_dtype, vocabulary=part.vocabulary
    )
    forms = tuple(each.form for each in (part.inputs or {"": single}).values())
    return RecordRules(task, tuple(config.task.target_shape), forms, tuple(part.inputs or ()))


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
        n_examples=config.declared_units,
        batch_size=config.training.batch_size,
        epsilon=config.budget.epsilon,
        delta=config.budget.delta,
        local_epochs=config.training.local_epochs,
        unit=config.budget.unit,
        max_records=config.budget.max_records,
    )
    plan = make_plan(
        spec,
        rounds=config.budget.planned_rounds,
        clip_norm=config.training.clip_norm,
        accountant=config.budget.accountant,
        clip_rule=config.training.clip,
    )
    part = config.metrics
    if part is None:
        return plan
    return plan_with_releases(plan, {(1.0, part.noise_multiplier): part.releases})


def _loss(config: SiteConfig) -> Loss | None:
    if config.training.loss is None:
        return None
    loss = load_object(config.training.loss, "training.loss")
    if not callable(loss):
        raise InvalidValueError("training.loss", config.training.loss, "must name a function")
    return loss
