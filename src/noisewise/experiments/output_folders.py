"""Folders of runs and comparisons: refused before anything is trained if they hold other work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig, dump_config, load_config
from noisewise.storage import write_atomic

__all__ = ["check_comparison_folder", "check_run_folder", "write_config"]

# Fields that two commands may set differently and still use the same runs.
_FREE_FIELDS = {
    "": {"compare", "method", "seed", "track"},
    "data": {"folder"},
    "training": {"executor", "learning_rate", "ray_address"},
}

_RUN_FILES = ("run.json", "result.json")


def check_run_folder(config: ExperimentConfig, folder: Path) -> None:
    """Refuse the folder of a run that was started with another config.

    A run checks its own folder too, by everything that decides its result. This check comes before
    ``config.toml`` is replaced, and names the field.

    Raises:
        InvalidValueError: names the first field that differs, or the file in place of a folder.
    """
    _check_config(config, folder, [folder])


def check_comparison_folder(config: ExperimentConfig, folder: Path, runs: Iterable[Path]) -> None:
    """Refuse a folder with runs under another config, or with a ``config.toml`` of the user's own.

    The file belongs to a comparison if it has no comments and ``runs`` next to it holds runs or
    nothing yet, or if it has exactly the content that would be written.

    Args:
        config: of the comparison.
        folder: of the comparison.
        runs: folders of its runs.

    Raises:
        InvalidValueError: names the first field that differs, or the file.
    """
    _check_config(config, folder, runs)
    file, begun = folder / "config.toml", folder / "runs"
    if not file.is_file() or file.read_bytes() == dump_config(config).encode():
        return
    lines = file.read_text(errors="replace").splitlines()
    if begun.is_dir() and not any(line.lstrip().startswith("#") for line in lines):
        used = [run for run in begun.iterdir() if _has_files(run)]
        if not used or any((run / name).exists() for run in used for name in _RUN_FILES):
            return
    raise InvalidValueError(
        "folder",
        str(folder),
        f"contains a {file.name} that was not written by a comparison and would be overwritten; "
        "choose another folder (--output), or move the file",
    )


def write_config(config: ExperimentConfig, folder: Path) -> None:
    """Write ``config.toml`` into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.toml", dump_config(config).encode())


def _check_config(config: ExperimentConfig, folder: Path, runs: Iterable[Path]) -> None:
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if nearest.exists() and not nearest.is_dir():
        raise InvalidValueError("folder", str(folder), f"must be a folder, and {nearest} is a file")
    if nearest != folder and not os.access(nearest, os.W_OK | os.X_OK):
        allowed = f"cannot be made: no permission to write to {nearest}; choose another (--output)"
        raise InvalidValueError("folder", str(folder), allowed)
    if not any((run / name).exists() for run in runs for name in _RUN_FILES):
        return
    try:
        stored = _deciding_fields(load_config(folder / "config.toml"))
    except InvalidValueError:
        return  # of another version, or damaged: the runs check themselves
    for field, value in _deciding_fields(config).items():
        if field == "training.rounds" and _extends(config, stored.get(field), folder):
            continue
        if stored.get(field) != value:
            raise InvalidValueError(
                "folder",
                str(folder),
                f"holds runs with {field} = {stored.get(field)!r}, not {value!r}; choose another "
                "folder (--output), or remove it",
            )


def _extends(config: ExperimentConfig, before: object, folder: Path) -> bool:
    """Whether the config asks for more rounds of the same runs.

    Raises:
        InvalidValueError: the plans of the runs cover no more rounds.
    """
    rounds = config.training.rounds
    if not isinstance(before, int) or rounds <= before:
        return False
    if config.population.planned_rounds is None:
        runs = f"runs of {before} round{'s' * (before != 1)}"
        allowed = (
            f"{folder} contains {runs}, and their plans cover no more rounds: their budgets are "
            "spent. Choose another folder (--output). To extend runs later, set "
            "population.planned_rounds from the start"
        )
        raise InvalidValueError("training.rounds", rounds, allowed)
    return True


def _has_files(run: Path) -> bool:
    """Whether a run left more in its folder than a lock; one that could not start did not."""
    return run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir())


def _deciding_fields(config: ExperimentConfig) -> dict[str, Any]:
    """The fields that decide results, dotted."""
    fields: dict[str, Any] = {}
    for name, table in config.model_dump().items():
        if name in _FREE_FIELDS[""]:
            continue
        if isinstance(table, Mapping):
            free = _FREE_FIELDS.get(name, ())
            fields |= {f"{name}.{key}": value for key, value in table.items() if key not in free}
        else:
            fields[name] = table
    return fields
