"""`PlannedRun`: the runs that a comparison or sweep will train, in ``planned.json`` of its folder.

A run has a folder only when it begins. `noisewise watch` reads this file to show how much is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from noisewise.storage import to_json, write_atomic

__all__ = ["PLAN_FILE", "PlannedRun", "read_planned_runs", "write_planned_runs"]

PLAN_FILE = "planned.json"


@dataclass(frozen=True)
class PlannedRun:
    """A run that a comparison will train.

    Attributes:
        folder: of the run, relative to the folder of the comparison or sweep.
        method: its name with its options.
        seed: of the run.
        rounds: planned number of rounds.
    """

    folder: str
    method: str
    seed: int
    rounds: int


def write_planned_runs(folder: Path, runs: Iterable[PlannedRun]) -> None:
    """Write the runs of a comparison or sweep into its folder.

    Raises:
        DiskFullError: the disk is full.
    """
    content = {"runs": [asdict(run) for run in runs]}
    write_atomic(folder / PLAN_FILE, (to_json(content, indent=1) + "\n").encode())


def read_planned_runs(folder: Path) -> tuple[PlannedRun, ...]:
    """Return the planned runs of a folder; empty if the file is missing or cannot be read.

    Runs outside of the folder are left out.
    """
    try:
        listed = json.loads((folder / PLAN_FILE).read_text())["runs"]
        runs = tuple(
            PlannedRun(str(run["folder"]), str(run["method"]), int(run["seed"]), int(run["rounds"]))
            for run in listed
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
    return tuple(run for run in runs if _is_inside(PurePosixPath(run.folder)) and run.rounds > 0)


def _is_inside(path: PurePosixPath) -> bool:
    """Whether a path, relative to a folder, stays in the folder."""
    return not path.is_absolute() and ".." not in path.parts
