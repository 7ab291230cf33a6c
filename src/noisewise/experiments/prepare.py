"""`prepare`: from a config, a method and a seed to one `Prepared` run, with every check."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from torch import nn

from noisewise.aggregation.auto_steps import AUTO, AutoSteps, auto_local_rate
from noisewise.aggregation.guard import Guard
from noisewise.aggregation.methods import Method, make_method, plan_clients
from noisewise.aggregation.noise_floor import noise_floor
from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.checks import non_negative_int
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ConfigSource, ExperimentConfig, MethodConfig, as_config
from noisewise.experiments.config_task import config_task
from noisewise.experiments.population import counts_classes, make_population, training_dataset
from noisewise.experiments.tracking import check_tracking
from noisewise.experiments.training_options import (
    load_stop_when,
    local_optimiser,
    with_training_options,
)
from noisewise.federation.attacks import Attack
from noisewise.federation.clients import Client
from noisewise.federation.part_checks import Names, check_parts
from noisewise.federation.prepared import Prepared
from noisewise.federation.settings import TrainingSettings
from noisewise.privacy.plan import LocalPlan, make_plan
from noisewise.report.population_report import ClientRow
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout
from noisewise.training.tasks import Task

__all__ = [
    "SeedSetup",
    "describe_population",
    "find_method",
    "prepare",
    "prepare_seed",
    "under_policy",
]

_log = logging.getLogger(__name__)
_LARGEST_SEED = 2**63 - 1  # that torch takes


def prepare(
    config: ConfigSource,
    method: str | MethodConfig | None = None,
    seed: int | None = None,
    *,
    setup: SeedSetup | None = None,
) -> Prepared:
    """Read the records, make clients, model and plans, and check everything. Nothing is trained.

    Args:
        config: a config, its content as a mapping, or the path of a TOML file.
        method: a name (with the options that the config's ``compare.methods`` gives it, if any) or
            a `MethodConfig`; by default the config's ``method``.
        seed: by default the config's.
        setup: from `prepare_seed`, to share the records with other runs under this seed.

    Returns:
        Everything that decides the result of the run, for `noisewise.simulate`.

    Raises:
        InvalidValueError: names the first invalid field, its value and what is allowed.
        NoisewiseError: a budget that no accountant can keep, a missing library or dataset.

    Example:
        >>> content = {
        ...     "data": {"name": "digits", "clients": 2},
        ...     "population": {"epsilon": 8.0, "batch_size": 64, "delta": 1e-3},
        ...     "model": {"name": "softmax"},
        ...     "training": {"rounds": 1, "learning_rate": 0.5, "clip_norm": 1.0},
        ... }
        >>> prepared = prepare(content, "DPFedAvg", seed=1)
        >>> prepared.method.name, [plan.rounds for plan in prepared.plans]
        ('DPFedAvg', [1, 1])
    """
    config = as_config(config)
    method_config = find_method(config, method)
    setup = prepare_seed(config, config.seed if seed is None else seed, setup)
    built = replace(
        make_method(method_config.name, method_config.options), name=method_config.label
    )
    plans, model = _make_plans(config, setup.clients, built), setup.new_model()
    size = ParameterLayout.of(model).size
    rate = (
        config.training.learning_rate
        if method_config.learning_rate is None
        else method_config.learning_rate
    )
    if rate == AUTO:
        _check_unit_features(config)
        built, rate = replace(built, auto=AutoSteps(config.training.rounds)), auto_local_rate(plans)
    settings = replace(setup.settings, learning_rate=rate)
    built = with_training_options(config, built)
    guarded, floor = under_policy(config, built, plans, size, settings.learning_rate)
    return Prepared(
        setup.clients,
        plans,
        guarded,
        model,
        settings,
        seed=setup.seed,
        task=setup.task,
        reference_plans=_make_plans(config, setup.clients, make_method("DPFedAvg")),
        attacks=[Attack(a.kind, tuple(a.clients), a.strength) for a in config.attacks],
        noise_floor=floor,
        stop_when=load_stop_when(config),
    )


def find_method(config: ExperimentConfig, method: str | MethodConfig | None = None) -> MethodConfig:
    """The settings of a method; see `prepare` for the arguments.

    Raises:
        InvalidValueError: ``method`` is neither the name of a method nor a `MethodConfig`.
    """
    if method is None:
        return config.method
    if isinstance(method, MethodConfig):
        return method
    kind: object = method
    if not isinstance(kind, str):
        name = getattr(kind, "__name__", type(kind).__name__)
        allowed = 'must be a name, "package.module:name", or a MethodConfig'
        raise InvalidValueError("method", name, allowed)
    listed = config.compare.methods or ()
    described = (MethodConfig(name=m) if isinstance(m, str) else m for m in listed)
    undescribed = MethodConfig(name=method)
    return next((m for m in described if m.name == undescribed.name), undescribed)


@dataclass(frozen=True)
class SeedSetup:
    """What all methods under one seed of a config share, checked.

    Attributes:
        config: the experiment.
        seed: of the split and of the initial model.
        clients: settings and records.
        new_model: makes a model with the initial parameters of the seed.
        settings: rounds and the like; `prepare` sets the learning rate.
        task: loss and metrics, with the number of classes.
    """

    config: ExperimentConfig
    seed: int
    clients: tuple[Client, ...]
    new_model: Callable[[], nn.Module]
    settings: TrainingSettings
    task: Task


def prepare_seed(config: ExperimentConfig, seed: int, last: SeedSetup | None = None) -> SeedSetup:
    """Read and split the records, make clients and model, and check all parts but the methods.

    Args:
        config: the experiment.
        seed: of the split and of the initial model.
        last: an earlier setup. It is returned if it is the one asked for; its records are reused if
            they are the same.

    Raises:
        InvalidValueError: names the invalid field.
        MissingExtraError: the config's trackers need a library that is not installed.
        UnsupportedModelError: a layer of the model mixes records.
    """
    if last is not None and last.seed == seed and last.config == config:
        return last
    if non_negative_int("seed", seed) > _LARGEST_SEED:
        raise InvalidValueError("seed", seed, f"must be at most {_LARGEST_SEED}")
    check_tracking(config)
    records = None
    if last is not None and last.seed == seed and _same_records(last.config, config):
        records = [client.data for client in last.clients]
    clients = make_population(config, seed, records)
    dataset, model, training = training_dataset(config), config.model, config.training
    task = config_task(config)
    if task.classes is None and task.targets in ("class", "any"):
        task = replace(task, classes=dataset.n_classes)
        if last is None and counts_classes(config.data):
            text = "task.classes is not declared: %d is used, the largest class of all records + 1"
            _log.warning(text, task.classes)
    n_outputs = task.outputs(dataset.train.targets.shape[1:])
    separate = ("learning_rate", "local_optimiser")
    names = [each.name for each in fields(TrainingSettings) if each.name not in separate]
    setup = SeedSetup(
        config,
        seed,
        clients,
        functools.partial(
            make_model, model.name, dataset.train.input_shape, n_outputs, seed, **model.options
        ),
        # `prepare` sets the learning rate, which a method may override.
        TrainingSettings(
            learning_rate=1.0,
            local_optimiser=local_optimiser(config),
            **{name: getattr(training, name) for name in names},
        ),
        task,
    )
    parts = Names(
        ("model.name", model.name),
        ("training.loss", training.loss or f"that of {task.name}"),
        ("training.metric", training.metric) if training.metric else ("task.metrics", "the metric"),
    )
    check_parts(task, setup.new_model(), clients, names=parts)
    return setup


def _check_unit_features(config: ExperimentConfig) -> None:
    """Raise if the records do not have the norm 1, which `AutoSteps` is made for."""
    if config.features is None or config.features.normalise != "unit":
        allowed = 'requires a [features] table with normalise = "unit"; give a number instead'
        raise InvalidValueError("learning_rate", AUTO, allowed)


def _same_records(one: ExperimentConfig, other: ExperimentConfig) -> bool:
    return all(
        getattr(one, table) == getattr(other, table) for table in ("data", "columns", "features")
    )


def _make_plans(
    config: ExperimentConfig, clients: Sequence[Client], method: Method
) -> tuple[LocalPlan, ...]:
    """The local plans of the clients under a method."""
    planned = config.population.planned_rounds
    return plan_clients(
        [client.spec for client in clients],
        method,
        rounds=config.training.rounds if planned is None else planned,
        clip_norm=config.training.clip_norm,
        accountant=config.training.accountant,
        clip_rule=config.training.clip,
    )


def under_policy(
    config: ExperimentConfig, method: Method, plans: Sequence[LocalPlan], size: int, rate: float
) -> tuple[Method, float | None]:
    """Apply the config's policy to a method: set the server's steps and add the guard.

    Args:
        config: its policy.
        method: one whose weights do not depend on noise gets no guard.
        plans: of the clients, which are the permitted ones unless the policy lists others.
        size: p, the number of parameters.
        rate: learning rate.

    Returns:
        The method, and the policy's noise floor F; None for a method without privacy.
    """
    policy, training = config.policy, config.training
    if not method.private:
        return method.with_server_steps(plans), None
    permitted = plans
    if policy.permitted is not None:
        permitted = [
            make_plan(
                ClientSpec(f"permitted-{i}", p.n_examples, p.batch_size, p.epsilon, p.delta,
                           p.local_epochs),
                rounds=training.rounds, clip_norm=training.clip_norm,
                accountant=training.accountant,
            )
            for i, p in enumerate(policy.permitted)
        ]  # fmt: skip
    method = method.with_server_steps(permitted)
    optimiser = local_optimiser(config)
    if optimiser.noise_steps(1) is None:
        if policy.tolerated_attackers:
            allowed = "cannot be combined with policy.tolerated_attackers: its noise has no floor"
            raise InvalidValueError("training.local_optimiser", optimiser.name, allowed)
        return method, None
    floor = noise_floor(
        permitted, size, rate, normalised=method.normalise, noise_steps=optimiser.noise_steps
    )
    if policy.tolerated_attackers and method.can_be_guarded:
        Guard(floor, policy.tolerated_attackers).check(len(plans))
        method = method.guarded(floor, policy.tolerated_attackers)
    return method, floor


def describe_population(config: ConfigSource) -> tuple[ClientRow, ...]:
    """Each client's settings, with the noise that its budget requires and the oracle's weight."""
    config = as_config(config)
    oracle = MethodConfig(name="Oracle", learning_rate=config.method.learning_rate)
    if local_optimiser(config).noise_steps(1) is None:  # the table then shows the noise of SGD
        config = as_config(config, {"training.local_optimiser": None})
    prepared = prepare(config, oracle)
    noise = prepared.true_noise
    weights = inverse_variance_weights(noise).tolist()
    columns = zip(prepared.clients, prepared.plans, noise.tolist(), weights, strict=True)
    return tuple(
        ClientRow(
            client.spec.id, client.spec.n_examples, client.spec.batch_size, client.spec.epsilon,
            plan.steps_per_round, plan.noise_multiplier, variance, weight,
        )
        for client, plan, variance, weight in columns
    )  # fmt: skip
