"""The list of artefacts: each TOML in `configs` is one table or figure of the paper."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig, parse_config, replace_fields
from noisewise.schema import Strict

__all__ = ["Artefact", "Part", "Sweep", "artefact_names", "load_artefact"]

Kind = Literal["exact", "first round", "trained", "elsewhere"]
Dataset = Literal["mnist", "fmnist", "cifar10", "cifar100"]


class Sweep(Strict):
    """The config field that differs between the columns of an artefact.

    Attributes:
        field: dotted name.
        values: one for each column.
        names: of the columns; the values as words by default.
        told: what a method's server must be told for the field to matter to it; other methods run
            in the first of the wanted columns only, since their runs are the same in all.
    """

    field: str
    values: Annotated[list[Any], Field(min_length=1)]
    names: list[str] | None = None
    told: str | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """Values by the column's name."""
        names = [str(v) for v in self.values] if self.names is None else self.names
        return dict(zip(names, self.values, strict=True))


class Part(Strict):
    """A column that another artefact computes as well."""

    name: str
    artefact: str
    column: str


class _Description(Strict):
    """What a TOML says about an artefact, besides its experiment."""

    title: str
    label: str
    place: Literal["main", "appendix"]
    kind: Kind
    make: str
    needs: str = "nothing but this program"
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
        name: as on the command line.
        about: title, LaTeX label in the paper's source, what is swept, and so on.
        experiment: the config as it stands in the TOML, without the sweep; None for closed forms.
    """

    name: str
    about: _Description
    experiment: Mapping[str, Any] | None

    def config(self, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
        """The experiment with some (dotted) fields replaced."""
        if self.experiment is None:
            raise InvalidValueError("artefact", self.name, "is computed without an experiment")
        return parse_config(replace_fields(self.experiment, overrides or {}))


@cache
def _all() -> dict[str, Artefact]:
    folder = files("noisewise.experiments.paper").joinpath("configs")
    found = []
    for file in folder.iterdir():
        if file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            experiment = content.pop("experiment", None)
            try:
                about = _Description.model_validate(content)
            except ValidationError as error:
                raise InvalidValueError(file.name, "its content", str(error)) from error
            found.append(Artefact(file.name.removesuffix(".toml"), about, experiment))
    return {a.name: a for a in sorted(found, key=lambda a: a.about.order)}


def artefact_names() -> tuple[str, ...]:
    """All names, in the order of the paper."""
    return tuple(_all())


def load_artefact(name: str) -> Artefact:
    """An artefact by name.

    Example:
        >>> load_artefact("noise-table").about.label
        'table:fmnist_noise'
    """
    if name not in _all():
        raise InvalidValueError("name", name, f"must be one of {', '.join(_all())}")
    return _all()[name]
