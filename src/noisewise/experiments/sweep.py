"""Sweeps: the same comparison under each combination of some config fields."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.experiments.comparison import comparison_jobs
from noisewise.experiments.config import ExperimentConfig, dump_config, load_config
from noisewise.experiments.runner import Job, check_runnable
from noisewise.federation.results import RunResult, to_json
from noisewise.report.comparison import write_report
from noisewise.report.sources import RunSet, name_sets, words_of
from noisewise.report.tables import method_rows
from noisewise.storage import write_atomic

__all__ = ["SweepPoint", "sweep_points", "write_sweep"]

_LONGEST_NAME = 80


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the swept fields: a comparison of its own.

    Attributes:
        settings: the swept fields and their values here, dotted.
        config: with those and all other replaced fields.
        jobs: of the comparison.
    """

    settings: Mapping[str, Any]
    config: ExperimentConfig
    jobs: tuple[Job, ...]

    @property
    def label(self) -> str:
        """The settings in words."""
        return words_of(self.settings)

    @property
    def folder_name(self) -> str:
        """A name for files; values that do not fit into one are told apart by a hash."""
        plain = ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in self.settings.items()
        )
        name = re.sub(r"[^A-Za-z0-9.=_,+-]+", "-", plain).strip("-")[:_LONGEST_NAME]
        if name == plain:
            return name
        return f"{name}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def sweep_points(
    path: Path | str,
    values: Mapping[str, Sequence[Any]],
    methods: Sequence[str] | None = None,
    seeds: int | None = None,
) -> tuple[SweepPoint, ...]:
    """The product of all values, checked as far as possible before anything runs.

    Args:
        path: of the config.
        values: dotted field -> values; fields with one value are replaced and not swept.
        methods: as for `comparison_jobs`.
        seeds: as for `comparison_jobs`.

    Raises:
        InvalidValueError: names the first field of the first combination that is wrong.
    """
    swept = [key for key, some in values.items() if len(some) > 1]
    points = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        config = load_config(path, chosen)
        jobs = comparison_jobs(config, methods, seeds)
        points.append(SweepPoint({key: chosen[key] for key in swept}, config, jobs))
    for point in points:
        try:
            check_runnable(point.config, point.jobs[0])
        except InvalidValueError as error:
            if not swept:
                raise
            allowed = f"{error.allowed} (in the combination {point.label})"
            raise InvalidValueError(error.field, error.value, allowed) from error
    return tuple(points)


def write_sweep(
    points: Sequence[SweepPoint], results: Sequence[Sequence[RunResult]], folder: Path
) -> tuple[RunSet, ...]:
    """Write the page, the figure and the tables over all points that have results.

    Returns:
        The sets of runs, named by their settings.
    """
    known = [(point, tuple(some)) for point, some in zip(points, results, strict=True) if some]
    sets = name_sets(
        [
            RunSet(
                some,
                point.folder_name,
                dump_config(point.config),
                settings=point.settings,
                folder=point.folder_name,
            )
            for point, some in known
        ]
    )
    write_report(sets, folder, title="Sweep", draw_parts=False)
    content = [
        {
            "settings": dict(point.settings),
            "folder": point.folder_name,
            "rows": [asdict(row) for row in method_rows(some)],
        }
        for point, some in known
    ]
    write_atomic(folder / "sweep.json", (to_json({"points": content}, indent=1) + "\n").encode())
    return sets
