"""`ExperimentConfig`: a whole experiment, read from TOML and strictly checked."""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, ValidationError, model_validator

from noisewise.aggregation.method_facts import METHODS
from noisewise.checks import known_name, matching_name, with_suggestion
from noisewise.data.columns import parse_columns
from noisewise.data.partition import NATURAL, PARTITIONS
from noisewise.data.specs import Unit, check_unit
from noisewise.errors import InvalidValueError
from noisewise.federation.attacks import Attack
from noisewise.federation.executors import ExecutorName, check_executor
from noisewise.federation.settings import DEFAULT_LOSS_RECORDS
from noisewise.schema import Count, OpenShare, Positive, Share, Strict, first_invalid_value
from noisewise.text import short_repr
from noisewise.training.features import Normalise
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH

__all__ = [
    "ConfigSource",
    "ExperimentConfig",
    "FeaturesConfig",
    "MethodConfig",
    "as_config",
    "check_overrides",
    "dump_config",
    "load_config",
    "parse_config",
    "replace_fields",
]

_OR_OWN = ', or your own as "module:function"'

Distribution = Literal[
    "Dist1", "Dist2", "Dist3", "Dist4", "Dist5", "Dist6", "Dist7", "Dist8", "Dist9"
]


def _partition_name(name: str) -> str:
    """A partition of the package, or an own one as ``"module:function"``."""
    return name if ":" in name else known_name("data.partition", name, PARTITIONS, _OR_OWN)


class DataConfig(Strict):
    """Which records to use, and how to split them over the clients.

    ``folder`` holds files that were placed there by hand. ``mean`` and ``std`` (one number, or one
    for each channel) replace the dataset's normalisation. ``limit`` is the number of training
    records to use; by default all.
    The partition ``"natural"`` needs no ``clients`` and leaves out clients with fewer than
    ``min_records`` records. ``target`` and ``classes`` belong to the name ``"csv"``: one file of
    ``folder`` for each client. The name ``"files"`` reads npz, safetensors, CSV and Parquet files;
    ``length`` is then the length of sequences. ``images`` declares that uint8 inputs are
    pixels, and ``dtype`` converts whole numbers; without them, inputs keep their types.
    ``text_length`` is the number of bytes of a text's record. ``person`` is the column of CSV and
    Parquet files that says whose record a line is. ``records_per_person`` generates persons, each
    with this many consecutive records of the dataset. Splits keep a person's records together.
    """

    name: str
    clients: Count | None = None
    partition: Annotated[str, AfterValidator(_partition_name)] = "iid"
    min_records: Count | None = None
    target: str | None = None
    classes: Annotated[list[str], Field(min_length=1)] | None = None
    max_labels: Count | None = None
    alpha: Positive | None = None
    test_fraction: OpenShare | None = None
    folder: str | None = None
    limit: Count | None = None
    mean: list[float] | None = None
    std: list[Positive] | None = None
    images: bool | None = None
    dtype: Literal["float32"] | None = None
    length: Count | None = None
    text_length: Count | None = None
    person: str | None = None
    records_per_person: Count | None = None

    @property
    def n_clients(self) -> int:
        """``clients``, which every partition but ``"natural"`` requires."""
        if self.clients is None:
            raise InvalidValueError("data.clients", None, "is missing and has no default")
        return self.clients


class PopulationConfig(Strict):
    """The clients' own settings: one value for all, a list, or one of the paper's distributions.

    The name of a distribution selects the authors' own draw for 20, 40 or 60 clients; with
    ``draws = "sampled"`` a new draw from ``seed``. The same holds for the batch sizes ``"mixed"``.
    With ``batch_share`` instead of ``batch_size``, each client's batch is that share of its own
    records, so that all clients take the same number of local steps.
    ``order`` gives the epsilons to the clients in the order of their numbers of records.
    ``unit`` is what the budgets protect: a record, or a person with all of their records. With
    "person", a batch is one of persons, and ``max_records`` is required: how many records of a
    person a step uses at most.
    """

    epsilon: Positive | list[Positive] | Distribution
    batch_size: Count | list[Count] | Literal["mixed"] | None = None
    batch_share: Share | None = None
    delta: OpenShare | list[OpenShare]
    local_epochs: Count | list[Count] = 1
    epsilon_scale: Positive = 1.0
    order: Literal["small_strict", "large_strict"] | None = None
    draws: Literal["authors", "sampled"] = "authors"
    seed: Annotated[int, Field(ge=0)] = 0
    planned_rounds: Count | list[Count] | None = None
    reported_epsilon: dict[str, Positive] = Field(default={})
    unit: Unit = "record"
    max_records: Count | None = None


class FeaturesConfig(Strict):
    """A fixed public map that every client applies to its records; `make_features` explains it."""

    name: str
    options: dict[str, Any] = Field(default={})
    weights: str | None = None
    sha256: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    normalise: Normalise = "unit"


class ModelConfig(Strict):
    """A model by name, or your own as ``"package.module:function"``."""

    name: str
    options: dict[str, Any] = Field(default={})


class ScheduleConfig(Strict):
    """The clients' learning rate over the rounds; `noisewise.aggregation.schedules.Schedule`."""

    name: Literal["constant", "linear", "cosine", "step"]
    rounds: Count | None = None
    warmup_rounds: Annotated[int, Field(ge=0)] = 0
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    every: Count = 1
    decay: Share = 0.5


class LocalOptimiserConfig(Strict):
    """The clients' optimiser; `noisewise.training.local_optimisers.LocalOptimiser` explains it."""

    name: Literal["sgd", "momentum", "adam"]
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    tau: Positive = 1e-8


class ServerOptimiserConfig(Strict):
    """The server's; `noisewise.aggregation.server_optimisers.ServerOptimiser` explains it."""

    name: Literal["momentum", "fedadam", "fedyogi"]
    rate: Positive = 1.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Positive = 1e-3


class TrainingConfig(Strict):
    """Rounds, local DP-SGD, and which processes compute it.

    ``learning_rate`` is a number, or "auto" for features of norm 1 (`AutoSteps`).
    ``executor`` is "serial", "processes" or "ray"; by default "processes" with several workers and
    "serial" with one. ``ray_address`` is the address of a running Ray cluster; without it, one is
    started on this machine. The results depend on neither.
    ``stop_when`` is an own function ``"package.module:name"``; see `Prepared`.
    """

    rounds: Count
    learning_rate: Positive | Literal["auto"]
    clip_norm: Positive
    clip: Literal["norm", "normalise"] = "norm"
    accountant: Literal["pld", "rdp", "moments"] = "pld"
    participation: Share = 1.0
    evaluate_every: Count = 1
    evaluate_clients: Share = 1.0
    schedule: ScheduleConfig | None = None
    local_optimiser: LocalOptimiserConfig | None = None
    server_optimiser: ServerOptimiserConfig | None = None
    stop_when: str | None = None
    physical_batch: Count = DEFAULT_PHYSICAL_BATCH
    device: str = "cpu"
    loss_records: Count = DEFAULT_LOSS_RECORDS
    executor: ExecutorName | None = None
    ray_address: str | None = None
    loss: str | None = None
    metric: str | None = None


class TaskConfig(Strict):
    """What the model is trained for; `noisewise.training.tasks` explains the tasks.

    ``metrics`` are names of the task's metrics or own ones; the first is the main one. ``classes``
    is the number of classes, labels or tokens. ``unit`` is that of a regression's targets.
    """

    name: str = "classification"
    metrics: Annotated[list[str], Field(min_length=1)] | None = None
    classes: Count | None = None
    unit: str | None = None


class AttackConfig(Strict):
    """Clients that attack; `noisewise.federation.attacks` explains kinds and strengths."""

    kind: str
    clients: Annotated[list[str], Field(min_length=1)]
    strength: Positive | None = None


class PermittedConfig(Strict):
    """Client settings that the federation's policy permits."""

    epsilon: Positive
    delta: OpenShare
    n_examples: Count
    batch_size: Count
    local_epochs: Count = 1


class PolicyConfig(Strict):
    """Which client settings the federation permits, and how many attackers the guard tolerates.

    ``permitted`` lists the permitted settings; by default those of the config's own clients. With 0
    tolerated attackers there is no guard, as in the paper.
    """

    tolerated_attackers: Annotated[int, Field(ge=0)] = 0
    permitted: list[PermittedConfig] | None = None


def _method_name(name: str) -> str:
    """The usual spelling of a method's name; `make_method` rejects unknown names."""
    return matching_name(name, METHODS)


class MethodConfig(Strict):
    """A method by name, or your own aggregator as ``"package.module:name"``, with its options.

    Example:
        >>> MethodConfig(name="RobustHDP", options={"estimate": "first"}).label
        'RobustHDP(estimate=first)'
    """

    name: Annotated[str, AfterValidator(_method_name)] = "RobustHDP"
    options: dict[str, Any] = Field(default={})
    learning_rate: Positive | Literal["auto"] | None = None

    @property
    def label(self) -> str:
        """The name with the options, as tables show it."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


class CompareConfig(Strict):
    """The methods that ``noisewise compare`` runs, and the number of seeds for each."""

    methods: Annotated[list[str | MethodConfig], Field(min_length=1)] | None = None
    seeds: Count = 3


class TrackConfig(Strict):
    """TensorBoard or MLflow, which receive the metrics of every round; needs the extra ``track``.

    ``tensorboard`` is a folder for event files. ``mlflow`` is the address of a server (any
    ``scheme://``), or a folder for a local database.
    """

    tensorboard: Annotated[str, Field(min_length=1)] | None = None
    mlflow: Annotated[str, Field(min_length=1)] | None = None


_OLD_DEFAULTS = {
    "loss": "torch.nn.functional:cross_entropy",
    "metric": "noisewise.federation.evaluation:accuracy",
}


class ExperimentConfig(Strict):
    """A whole experiment, as a TOML file describes it.

    Example:
        >>> config = ExperimentConfig(
        ...     data={"name": "digits", "clients": 4},
        ...     population={"epsilon": 2.0, "batch_size": 32, "delta": 1e-3},
        ...     model={"name": "softmax"},
        ...     training={"rounds": 3, "learning_rate": 0.5, "clip_norm": 1.0},
        ... )
        >>> config.method.name
        'RobustHDP'
    """

    data: DataConfig
    columns: dict[str, Any] | None = None
    population: PopulationConfig
    model: ModelConfig
    task: TaskConfig = TaskConfig()
    training: TrainingConfig
    method: MethodConfig = MethodConfig()
    compare: CompareConfig = CompareConfig()
    policy: PolicyConfig = PolicyConfig()
    attacks: list[AttackConfig] = Field(default=[])
    features: FeaturesConfig | None = None
    track: TrackConfig = TrackConfig()
    seed: Annotated[int, Field(ge=0)] = 0

    def __repr__(self) -> str:
        """What is trained, on what, how long and with which seed."""
        return short_repr(
            self, data=self.data.name, clients=self.data.clients, model=self.model.name,
            method=self.method.label, rounds=self.training.rounds, seed=self.seed,
        )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _drop_old_defaults(cls, content: Any) -> Any:
        """Older files name the loss and the metric of a classification, which are the defaults."""
        training = content.get("training") if isinstance(content, Mapping) else None
        if not isinstance(training, Mapping) or (content.get("task") or {}) != {}:
            return content
        changed = {key: value for key, value in training.items() if _OLD_DEFAULTS.get(key) != value}
        return {**content, "training": changed}

    @model_validator(mode="after")
    def _check_lists(self) -> ExperimentConfig:
        if (self.population.batch_size is None) == (self.population.batch_share is None):
            raise InvalidValueError(
                "population.batch_size",
                self.population.batch_size,
                "must be given, or batch_share instead of it",
            )
        check_unit(self.population.unit, self.population.max_records, "population.")
        check_executor(self.training.executor, self.training.ray_address)
        if self.columns is not None:
            parse_columns(self.columns)
        n = self.data.clients if self.data.partition == NATURAL else self.data.n_clients
        for name in ("epsilon", "batch_size", "delta", "local_epochs", "planned_rounds"):
            values = getattr(self.population, name)
            if n is not None and isinstance(values, list) and len(values) != n:
                raise InvalidValueError(
                    f"population.{name}",
                    f"{len(values)} values",
                    f"must be one value or data.clients = {n} of them",
                )
        for attack in self.attacks:
            Attack(attack.kind, tuple(attack.clients), attack.strength)
        return self


def parse_config(content: Mapping[str, Any]) -> ExperimentConfig:
    """Check the content of a config.

    Args:
        content: tables by name, as `tomllib` returns them.

    Returns:
        The config with all defaults.

    Raises:
        InvalidValueError: names the first invalid field, its value and what is allowed.
    """
    try:
        return ExperimentConfig.model_validate(dict(content))
    except ValidationError as error:
        raise first_invalid_value(error, ExperimentConfig) from None


def load_config(path: Path | str, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Read a TOML file, replace some fields and check the result.

    Args:
        path: of the file.
        overrides: dotted field -> value, such as ``{"training.rounds": 5}``.

    Raises:
        InvalidValueError: names the file or the first invalid field.

    Example:
        >>> load_config("nowhere.toml")
        Traceback (most recent call last):
        ...
        noisewise.errors.InvalidValueError: config = 'nowhere.toml': must be a file that can be ...
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        allowed = f"must be a file that can be read ({error.strerror})"
        if not Path(path).exists():
            beside = sorted(file.name for file in Path(path).parent.glob("*.toml"))
            allowed = with_suggestion(Path(path).name, beside, allowed)
        raise InvalidValueError("config", str(path), allowed) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("config", str(path), f"must be TOML ({error})") from error
    return parse_config(replace_fields(content, overrides or {}))


ConfigSource = ExperimentConfig | Mapping[str, Any] | Path | str
"""A config, its content as a mapping, or the path of a TOML file."""


def as_config(source: ConfigSource, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Return the config that ``source`` is, holds or names, with some fields replaced.

    Args:
        source: a config, its content as a mapping, or the path of a TOML file.
        overrides: dotted field -> value, as ``--set`` on the command line.

    Raises:
        InvalidValueError: names the file or the first invalid field.
    """
    kind: object = source
    if not isinstance(kind, (ExperimentConfig, Mapping, str, os.PathLike)):
        allowed = "must be a config, its content as a mapping, or the path of a TOML file"
        raise InvalidValueError("config", type(kind).__name__, allowed)
    if isinstance(source, ExperimentConfig):
        if not overrides:
            return source
        source = source.model_dump()
    if isinstance(source, Mapping):
        return parse_config(replace_fields(source, overrides or {}))
    return load_config(source, overrides)


def check_overrides(overrides: object) -> None:
    """Refuse what is not a mapping from dotted names of config fields to values."""
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        allowed = "must be a mapping from dotted names of config fields to values"
        raise InvalidValueError("set", overrides, allowed)


def replace_fields(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config's content with some fields (dotted name -> value) replaced."""
    check_overrides(overrides)
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


def dump_config(config: ExperimentConfig) -> str:
    """Return a config as TOML, with all defaults, so that `parse_config` can read it again."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))
