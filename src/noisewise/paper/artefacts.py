"""The artefacts: each TOML file in `configs` describes one table or figure of the paper."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from noisewise.checks import known_name
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig, parse_config, replace_fields
from noisewise.schema import Strict

__all__ = ["Artefact", "Part", "Sweep", "artefact_names", "load_artefact"]

Kind = Literal["exact", "first round", "trained", "elsewhere"]
Dataset = Literal["mnist", "fmnist", "cifar10", "cifar100"]


class Sweep(Strict):
    """The config field that differs between the columns of an artefact.

    Attributes:
        field: its dotted name.
        values: one value for each column.
        names: the names of the columns; by default the values as text.
        disclosure: through which the field reaches a method's server. Methods that do not
            receive it run in the first of the selected columns only, since their runs would be the
            same in all columns.
    """

    field: str
    values: Annotated[list[Any], Field(min_length=1)]
    names: list[str] | None = None
    disclosure: str | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """The values by column name."""
        names = [str(v) for v in self.values] if self.names is None else self.names
        return dict(zip(names, self.values, strict=True))


class Part(Strict):
    """A column that belongs to another artefact."""

    name: str
    artefact: str
    column: str


class _Description(Strict):
    """The fields of an artefact's TOML file, except its experiment."""

    title: str
    label: str
    place: Literal["main", "appendix"]
    kind: Kind
    make: str
    needs: str = "no data"
    order: int
    paper: str | None = None
    rows: dict[str, str] = Field(default={})
    fedavg: float | None = None
    learning_rates: Dataset | None = None
    learning_rate_columns: dict[str, str] = Field(default={})
    tolerance: float = 2.0
    relative: bool = False
    notes: list[str] = Field(default=[])
    evaluations: dict[str, int] = Field(default={})
    sweep: Sweep | None = None
    parts: list[Part] = Field(default=[])
    options: dict[str, Any] = Field(default={})


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper.

    Attributes:
        name: the name on the command line.
        about: title, LaTeX label in the paper's source, the swept field and so on.
        experiment: the config in the TOML file, without the sweep; None for closed forms.
    """

    name: str
    about: _Description
    experiment: Mapping[str, Any] | None

    def config(self, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
        """Return the experiment with some fields replaced, by dotted name.

        Raises:
            InvalidValueError: if the artefact has no experiment or a field is invalid.
        """
        if self.experiment is None:
            raise InvalidValueError("artefact", self.name, "is computed without an experiment")
        return parse_config(replace_fields(self.experiment, overrides or {}))


@cache
def _all() -> dict[str, Artefact]:
    folder = files("noisewise.paper").joinpath("configs")
    artefacts = []
    for file in folder.iterdir():
        if file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            experiment = content.pop("experiment", None)
            try:
                about = _Description.model_validate(content)
            except ValidationError as error:
                raise InvalidValueError(file.name, "its content", str(error)) from error
            artefacts.append(Artefact(file.name.removesuffix(".toml"), about, experiment))
    return {a.name: a for a in sorted(artefacts, key=lambda a: a.about.order)}


def artefact_names() -> tuple[str, ...]:
    """Return all names, in the order of the paper."""
    return tuple(_all())


def load_artefact(name: str) -> Artefact:
    """Return an artefact by name.

    Raises:
        InvalidValueError: if the name is unknown.

    Example:
        >>> load_artefact("noise-table").about.label
        'table:fmnist_noise'
    """
    return _all()[known_name("name", name, _all())]
