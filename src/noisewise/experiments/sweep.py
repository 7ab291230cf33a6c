"""Sweeps: every combination of the values of some config fields, each a comparison of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.experiments.config import (
    ConfigSource,
    ExperimentConfig,
    MethodConfig,
    as_config,
    check_overrides,
)
from noisewise.experiments.runner import Job, comparison_jobs
from noisewise.federation.planned_runs import PlannedRun
from noisewise.report.run_sets import settings_text

__all__ = ["SweepPoint", "planned_runs", "sweep_points", "sweep_runs"]

_LONGEST_NAME = 80


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the swept fields, with its comparison.

    Attributes:
        settings: dotted field -> value; empty if nothing is swept.
        config: with these values.
        jobs: of the comparison.
    """

    settings: Mapping[str, Any]
    config: ExperimentConfig
    jobs: tuple[Job, ...]

    @property
    def label(self) -> str:
        """The settings in words."""
        return settings_text(self.settings)

    @property
    def folder_name(self) -> str:
        """The name of the folder; a hash distinguishes values that are no file names."""
        plain = ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in self.settings.items()
        )
        name = re.sub(r"[^A-Za-z0-9.=_,+-]+", "-", plain).strip("-")[:_LONGEST_NAME]
        if name == plain:
            return name
        return f"{name}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def sweep_points(
    config: ConfigSource,
    values: Mapping[str, Sequence[Any]],
    methods: Sequence[str | MethodConfig] | None = None,
    seeds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[SweepPoint, ...]:
    """Every combination of the values; a single one if nothing is swept.

    Args:
        config: a config, its content as a mapping, or the path of a TOML file.
        values: dotted field -> its values.
        methods: see `noisewise.compare`.
        seeds: see `noisewise.compare`.
        overrides: other config fields to replace.

    Raises:
        InvalidValueError: names the first invalid field.
    """
    _check_values(values)
    check_overrides({} if overrides is None else overrides)
    points = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        swept = as_config(config, {**(overrides or {}), **settings})
        jobs = comparison_jobs(swept, methods, seeds)
        _check_that_it_matters(settings, jobs)
        points.append(SweepPoint(settings, swept, jobs))
    return tuple(points)


def _check_values(values: object) -> None:
    """Refuse swept fields without values, and one value or text in place of a list."""
    if not isinstance(values, Mapping):
        allowed = "must be a mapping from dotted names of config fields to lists of values"
        raise InvalidValueError("sweep", values, allowed)
    for field, several in values.items():
        if isinstance(several, (str, Mapping)) or not isinstance(several, Collection):
            raise InvalidValueError(f"sweep: {field}", several, "must be a list of values")
        if not several:
            raise InvalidValueError(f"sweep: {field}", several, "must be one or more values")


def _check_that_it_matters(settings: Mapping[str, Any], jobs: Sequence[Job]) -> None:
    """Refuse a swept learning rate that methods override, since their runs would be the same."""
    rate = "training.learning_rate"
    pinned = dict.fromkeys(job.label for job in jobs if job.method.learning_rate is not None)
    if rate in settings and pinned:
        allowed = (
            f"would change nothing for {', '.join(pinned)}, which have a learning_rate of their "
            "own: remove it from compare.methods or method, or leave these methods out"
        )
        raise InvalidValueError(f"sweep: {rate}", settings[rate], allowed)


def planned_runs(
    config: ExperimentConfig, jobs: Sequence[Job], comparison: Path, base: Path
) -> list[PlannedRun]:
    """The runs of a comparison, for `noisewise watch`.

    Args:
        config: of all runs.
        jobs: of the comparison.
        comparison: its folder.
        base: the folder to which the runs' folders are relative.
    """
    rounds = config.training.rounds
    return [
        PlannedRun(
            job.folder_in(comparison).relative_to(base).as_posix(), job.label, job.seed, rounds
        )
        for job in jobs
    ]


def sweep_runs(points: Sequence[SweepPoint], folder: Path) -> list[PlannedRun]:
    """The runs of all comparisons of a sweep in its folder."""
    return [
        run
        for point in points
        for run in planned_runs(point.config, point.jobs, folder / point.folder_name, folder)
    ]
