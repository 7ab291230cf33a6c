"""Strict configs: a TOML file becomes an `ExperimentConfig`, or one line says what is wrong."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack
from noisewise.federation.executors import ExecutorName, check_executor
from noisewise.federation.settings import DEFAULT_LOSS_RECORDS
from noisewise.schema import Count, OpenShare, Positive, Share, Strict
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH

__all__ = ["ExperimentConfig", "dump_config", "load_config", "parse_config", "replace_fields"]

Distribution = Literal[
    "Dist1", "Dist2", "Dist3", "Dist4", "Dist5", "Dist6", "Dist7", "Dist8", "Dist9"
]


class DataConfig(Strict):
    """Which records, and how they are split over the clients.

    ``folder`` is where files were placed by hand; ``mean`` and ``std`` (one number, or one for each
    channel) replace the dataset's normalisation; ``limit`` takes only so many training records.
    """

    name: str
    clients: Count
    partition: str = "iid"
    max_labels: Count | None = None
    alpha: Positive | None = None
    test_fraction: OpenShare | None = None
    folder: str | None = None
    limit: Count | None = None
    mean: list[float] | None = None
    std: list[Positive] | None = None


class PopulationConfig(Strict):
    """The clients' own settings: one value for all, one for each, or one of the paper's draws.

    A distribution's name means the authors' own draw for 20, 40 or 60 clients, or with
    ``draws = "sampled"`` a new one from ``seed``; so do the batch sizes ``"mixed"``. With
    ``batch_share`` instead, each client's batch is that share of its own records, so that all take
    the same number of local steps.
    """

    epsilon: Positive | list[Positive] | Distribution
    batch_size: Count | list[Count] | Literal["mixed"] | None = None
    batch_share: Share | None = None
    delta: OpenShare | list[OpenShare]
    local_epochs: Count | list[Count] = 1
    epsilon_scale: Positive = 1.0
    draws: Literal["authors", "sampled"] = "authors"
    seed: Annotated[int, Field(ge=0)] = 0
    planned_rounds: Count | list[Count] | None = None
    reported_epsilon: dict[str, Positive] = Field(default={})


class ModelConfig(Strict):
    """A model by name, or an own one as ``"package.module:function"``."""

    name: str
    options: dict[str, Any] = Field(default={})


class TrainingConfig(Strict):
    """Rounds, local DP-SGD, and who computes it.

    ``executor`` is "serial", "processes" or "ray" (by default processes where there are several
    workers); ``ray_address`` is that of a running cluster, without which one is started here. The
    results do not depend on either.
    """

    rounds: Count
    learning_rate: Positive
    clip_norm: Positive
    accountant: Literal["pld", "rdp", "moments"] = "pld"
    participation: Share = 1.0
    evaluate_every: Count = 1
    physical_batch: Count = DEFAULT_PHYSICAL_BATCH
    device: str = "cpu"
    loss_records: Count = DEFAULT_LOSS_RECORDS
    executor: ExecutorName | None = None
    ray_address: str | None = None
    loss: str = "torch.nn.functional:cross_entropy"
    metric: str = "noisewise.federation.evaluation:accuracy"


class AttackConfig(Strict):
    """Clients that attack; kinds and what strength means are in `noisewise.federation.attacks`."""

    kind: str
    clients: Annotated[list[str], Field(min_length=1)]
    strength: Positive | None = None


class PermittedConfig(Strict):
    """Settings with which a client may take part under the federation's policy."""

    epsilon: Positive
    delta: OpenShare
    n_examples: Count
    batch_size: Count
    local_epochs: Count = 1


class PolicyConfig(Strict):
    """What a noise-aware server may take for granted, and how many attackers it shall tolerate.

    ``permitted`` lists the settings that the federation permits; by default they are those of the
    config's own clients. With 0 tolerated attackers there is no guard: the paper's method.
    """

    tolerated_attackers: Annotated[int, Field(ge=0)] = 0
    permitted: list[PermittedConfig] | None = None


class MethodConfig(Strict):
    """A method by name, or an own aggregator as ``"package.module:name"``, with its options."""

    name: str = "RobustHDP"
    options: dict[str, Any] = Field(default={})
    learning_rate: Positive | None = None


class CompareConfig(Strict):
    """What ``noisewise compare`` runs: a list of methods, each with a number of seeds."""

    methods: Annotated[list[str | MethodConfig], Field(min_length=1)] | None = None
    seeds: Count = 3


class TrackConfig(Strict):
    """Where else the figures of rounds go while they run; needs the extra ``track``.

    ``tensorboard`` is a folder for event files; ``mlflow`` the address of a server (any
    ``scheme://``), or a folder for a database of its own.
    """

    tensorboard: Annotated[str, Field(min_length=1)] | None = None
    mlflow: Annotated[str, Field(min_length=1)] | None = None


class ExperimentConfig(Strict):
    """A whole experiment, as a TOML file describes it."""

    data: DataConfig
    population: PopulationConfig
    model: ModelConfig
    training: TrainingConfig
    method: MethodConfig = MethodConfig()
    compare: CompareConfig = CompareConfig()
    policy: PolicyConfig = PolicyConfig()
    attacks: list[AttackConfig] = Field(default=[])
    track: TrackConfig = TrackConfig()
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _lists_fit(self) -> ExperimentConfig:
        if (self.population.batch_size is None) == (self.population.batch_share is None):
            raise InvalidValueError(
                "population.batch_size",
                self.population.batch_size,
                "must be given, or batch_share instead of it",
            )
        check_executor(self.training.executor, self.training.ray_address)
        n = self.data.clients
        for name in ("epsilon", "batch_size", "delta", "local_epochs", "planned_rounds"):
            values = getattr(self.population, name)
            if isinstance(values, list) and len(values) != n:
                raise InvalidValueError(
                    f"population.{name}",
                    f"{len(values)} values",
                    f"must be one value or data.clients = {n} of them",
                )
        for attack in self.attacks:
            Attack(attack.kind, tuple(attack.clients), attack.strength)
        return self


def parse_config(content: Mapping[str, Any]) -> ExperimentConfig:
    """Check a config that is a mapping already.

    Raises:
        InvalidValueError: names the first wrong field, its value and what is allowed.
    """
    try:
        return ExperimentConfig.model_validate(dict(content))
    except ValidationError as error:
        raise _first_fault(error) from None


def load_config(path: Path | str, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Read a TOML file, replace ``overrides`` (dotted field -> value) and check it.

    Example:
        >>> load_config("nowhere.toml")
        Traceback (most recent call last):
        ...
        noisewise.errors.InvalidValueError: config = 'nowhere.toml': must be a file that can be ...
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidValueError(
            "config", str(path), f"must be a file that can be read ({error.strerror})"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("config", str(path), f"must be TOML ({error})") from error
    return parse_config(replace_fields(content, overrides or {}))


def replace_fields(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config's content with some fields (dotted name -> value) replaced."""
    changed: dict[str, Any] = copy.deepcopy(dict(content))
    for key, value in overrides.items():
        *parents, last = key.split(".")
        table: Any = changed
        for parent in parents:
            table = table.setdefault(parent, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise InvalidValueError("set", key, "must be a dotted name of a config field")
        table[last] = value
    return changed


def _first_fault(error: ValidationError) -> InvalidValueError:
    """One line for people, out of pydantic's list.

    A field that may be several things (a number, a list, a name) fails once for each of them, so
    all faults of the first faulty field are told together.
    """
    faults = error.errors()
    first = faults[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        return cause
    place = first["loc"][:2]
    field = ".".join(map(str, place))
    if first["type"] == "missing":
        name = ".".join(map(str, first["loc"]))
        return InvalidValueError(name, None, "is missing and has no default")
    here = [fault for fault in faults if fault["loc"][:2] == place]
    unknown = next((fault for fault in here if fault["type"] == "extra_forbidden"), None)
    if unknown is not None:
        key, allowed = unknown["loc"][-1], ", ".join(sorted(_keys_at(unknown["loc"][:-1])))
        name = field if len(unknown["loc"]) <= 2 else f"{field}: {key}"
        return InvalidValueError(name, unknown["input"], f"unknown key, must be one of {allowed}")
    allowed = " or ".join(dict.fromkeys(_wish(fault["msg"]) for fault in here))
    return InvalidValueError(field, first["input"], allowed)


def _wish(message: str) -> str:
    """Pydantic's complaint in the words of the other errors."""
    table = re.sub(r"a valid dictionary or instance of \w+", "a table", message)
    return table.replace("Input should be", "must be").replace("List should", "must")


def _keys_at(place: tuple[int | str, ...]) -> list[str]:
    """The keys that are allowed in a table; numbers in its place count the items of a list."""
    table: type[BaseModel] = MethodConfig if "methods" in place else ExperimentConfig
    for part in () if "methods" in place else place:
        if isinstance(part, str):
            (table,) = _tables_in(table.model_fields[part].annotation)
    return list(table.model_fields)


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a type speaks of: itself, or what a list, a union or the like is made of."""
    if inner := get_args(annotation):
        return [table for one in inner for table in _tables_in(one)]
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_table else []


def dump_config(config: ExperimentConfig) -> str:
    """The config as TOML, with all defaults filled in, so that it can be run again."""
    content = config.model_dump(exclude_none=True)
    lines = [
        f"{key} = {_toml(value)}" for key, value in content.items() if not isinstance(value, dict)
    ]
    for name, table in content.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
