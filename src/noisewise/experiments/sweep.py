"""Sweeps: every combination of the values of some config fields, each a comparison of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noisewise.experiments.config import ConfigSource, ExperimentConfig, MethodConfig, as_config
from noisewise.experiments.runner import Job, comparison_jobs
from noisewise.report.run_sets import settings_text

__all__ = ["SweepPoint", "sweep_points"]

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
    points = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        swept = as_config(config, {**(overrides or {}), **settings})
        points.append(SweepPoint(settings, swept, comparison_jobs(swept, methods, seeds)))
    return tuple(points)
