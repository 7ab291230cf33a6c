"""From a config to the things that it names: records, clients, model, plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from noisewise.aggregation.guard import Guard
from noisewise.aggregation.methods import Method, make_method, plan_clients
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.policy import noise_floor, plan_noise
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.data.datasets import Dataset, Examples, Scaling, load_dataset
from noisewise.data.partition import split_dataset
from noisewise.data.populations import (
    authors_population,
    make_specs,
    sample_batch_sizes,
    sample_epsilons,
)
from noisewise.data.progress import progress_bar
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import DataConfig, ExperimentConfig
from noisewise.federation.attacks import Attack
from noisewise.federation.clients import Client, make_clients
from noisewise.federation.results import ClientRow
from noisewise.plugins import load_object
from noisewise.privacy.plan import LocalPlan, make_plan
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout

__all__ = [
    "describe_population",
    "make_initial_model",
    "make_plans",
    "make_population",
    "read_dataset",
    "under_policy",
]


def read_dataset(data: DataConfig) -> Dataset:
    """A dataset by name, or what an own function ``"package.module:function"`` returns."""
    mean, std = data.mean, data.std
    if (mean is None) != (std is None):
        raise InvalidValueError("data.mean", mean, f"must be given together with std = {std}")
    scaling = Scaling(tuple(mean), tuple(std)) if mean is not None and std is not None else None
    dataset = _read(data.name, data.folder, scaling)
    return dataset if data.limit is None else _thinned(dataset, data.limit)


def _thinned(dataset: Dataset, limit: int) -> Dataset:
    """``limit`` training records spread evenly over the whole, and as small a share of the test."""
    n = len(dataset.train)
    if limit > n:
        raise InvalidValueError("data.limit", limit, f"must be at most the {n} training records")

    def some(examples: Examples) -> Examples:
        keep = max(1, len(examples) * limit // n)
        return examples.take(np.linspace(0, len(examples) - 1, keep).astype(np.int64))

    test = None if dataset.test is None else some(dataset.test)
    return replace(dataset, train=some(dataset.train), test=test)


@functools.lru_cache(maxsize=2)
def _read(name: str, folder: str | None, scaling: Scaling | None) -> Dataset:
    """Kept, since the runs of a comparison share their dataset."""
    if ":" not in name:
        with progress_bar() as progress:
            return load_dataset(name, folder=folder, scaling=scaling, progress=progress)
    found = load_object(name, "data.name")
    try:
        inspect.signature(found).bind() if callable(found) else None
    except TypeError as error:
        allowed = f"must be a function without arguments that gives a noisewise Dataset ({error})"
        raise InvalidValueError("data.name", name, allowed) from error
    made = found() if callable(found) else found
    if not isinstance(made, Dataset):
        raise InvalidValueError("data.name", name, "must give a noisewise Dataset")
    return made


def make_population(config: ExperimentConfig, seed: int) -> tuple[Client, ...]:
    """The clients of a config: the split depends on ``seed``, their settings do not."""
    data, wish = config.data, config.population
    partition: Any = data.partition
    if ":" in data.partition:
        partition = load_object(data.partition, "data.partition")
    parts = split_dataset(
        read_dataset(data),
        data.clients,
        partition=partition,
        test_fraction=data.test_fraction,
        seed=seed,
        max_labels=data.max_labels,
        alpha=data.alpha,
    )
    epsilons: Any = wish.epsilon
    batch_sizes: Any = wish.batch_size
    if isinstance(epsilons, str):
        epsilons = (
            authors_population(epsilons, data.clients).epsilons
            if wish.draws == "authors"
            else sample_epsilons(epsilons, data.clients, wish.seed)
        )
    if wish.batch_share is not None:
        batch_sizes = [max(1, round(wish.batch_share * len(part.train))) for part in parts]
    elif batch_sizes == "mixed":
        batch_sizes = (
            authors_population("Dist1", data.clients).batch_sizes
            if wish.draws == "authors"
            else sample_batch_sizes(data.clients, wish.seed)
        )
    if wish.epsilon_scale != 1:
        scale = wish.epsilon_scale
        several = isinstance(epsilons, Sequence)
        epsilons = [scale * e for e in epsilons] if several else scale * epsilons
    specs = make_specs(
        parts,
        epsilons=epsilons,
        batch_sizes=batch_sizes,
        delta=wish.delta,
        local_epochs=wish.local_epochs,
    )
    return make_clients(specs, parts, _reported(config, specs))


def _reported(config: ExperimentConfig, specs: Sequence[ClientSpec]) -> dict[str, float]:
    """Epsilons that clients report instead of their own."""
    reported: dict[str, float] = dict(config.population.reported_epsilon)
    for wish in config.attacks:
        if wish.kind == "falsified_epsilon":
            factor = Attack(wish.kind, tuple(wish.clients), wish.strength).size
            reported |= {s.id: factor * s.epsilon for s in specs if s.id in wish.clients}
    return reported


def make_initial_model(config: ExperimentConfig, seed: int) -> nn.Module:
    """The model of a config with the initial parameters of a seed."""
    dataset = read_dataset(config.data)
    shape = dataset.train.inputs.shape[1:]
    return make_model(config.model.name, shape, dataset.n_classes, seed, **config.model.options)


def make_plans(
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
    )


def under_policy(
    config: ExperimentConfig, method: Method, plans: Sequence[LocalPlan], size: int, rate: float
) -> tuple[Method, float | None]:
    """The method under the config's policy: server steps, guard, and the policy's floor F.

    Methods whose weights do not rest on noise have no use for it and stay as they are.
    """
    policy, training = config.policy, config.training
    if not method.private:
        return method.settled(plans), None
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
    method = method.settled(permitted)
    floor = noise_floor(permitted, size, rate, normalised=method.normalise)
    if policy.tolerated_attackers and isinstance(method.aggregator, NoiseWise | RobustHDP):
        Guard(floor, policy.tolerated_attackers).check(config.data.clients)
        method = method.guarded(floor, policy.tolerated_attackers)
    return method, floor


def describe_population(config: ExperimentConfig) -> tuple[ClientRow, ...]:
    """Each client's settings with the noise that its own budget demands and the oracle's weight."""
    clients = make_population(config, config.seed)
    plans = make_plans(config, clients, make_method("Oracle"))
    size = ParameterLayout.of(make_initial_model(config, config.seed)).size
    rate = config.method.learning_rate or config.training.learning_rate
    noise = [plan_noise(plan, size, rate) for plan in plans]
    weights = inverse_variance_weights(noise)
    return tuple(
        ClientRow(
            id=client.spec.id,
            n_examples=client.spec.n_examples,
            batch_size=client.spec.batch_size,
            epsilon=client.spec.epsilon,
            steps_per_round=plan.steps_per_round,
            noise_multiplier=plan.noise_multiplier,
            noise_variance=variance,
            oracle_weight=float(weight),
        )
        for client, plan, variance, weight in zip(clients, plans, noise, weights, strict=True)
    )
