"""Find runs on disk for a report, and group them by their configs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.federation.results import RunResult, load_run
from noisewise.federation.round_times import RoundTime, read_times
from noisewise.text import printable

__all__ = [
    "FoundRuns",
    "RunSet",
    "find_runs",
    "flatten_config",
    "name_sets",
    "read_round_times",
    "read_timings",
    "settings_text",
]

_MARKS = ("run.json", "rounds.jsonl")
_DEPTH = 6
_MOST_SETTINGS, _LONGEST_NAME = 3, 120


@dataclass(frozen=True)
class RunSet:
    """Runs with the same config that are compared: different methods and seeds.

    Attributes:
        results: the runs, sorted by seed.
        name: name that differs from the other sets of the report.
        config: TOML text; empty if unknown.
        timings: content of ``timing.json`` by run, for runs that were profiled.
        settings: config fields (dotted) in which the set differs from the other sets.
        folder: name of the folder with the runs.
        times: when the rounds took place, by (method, seed), for runs that recorded it.
    """

    results: tuple[RunResult, ...]
    name: str = ""
    config: str = ""
    timings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    times: Mapping[tuple[str, int], tuple[RoundTime, ...]] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The name with only characters that file names and ids may have."""
        return re.sub(r"[^A-Za-z0-9.=]+", "-", self.name).strip("-") or "runs"


@dataclass(frozen=True)
class FoundRuns:
    """Sets of runs, and a line about each run that could not be read.

    Attributes:
        sets: the sets.
        notes: one line for each run that could not be read.
    """

    sets: tuple[RunSet, ...]
    notes: tuple[str, ...]


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's. `noisewise reproduce` also writes a ``result.json``."""
    if any((folder / mark).is_file() for mark in _MARKS):
        return True
    try:
        result = json.loads((folder / "result.json").read_text())
    except OSError:
        return False
    except ValueError:
        return True  # a damaged run, which the report has to mention
    return not (isinstance(result, dict) and "artefact" in result)


def _run_folders(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """Return the run folders in or below a folder; subfolders of a run are not searched."""
    if _is_run(folder):
        return [folder]
    if depth == 0:
        return []
    children = sorted(child for child in folder.iterdir() if child.is_dir())
    return [run for child in children for run in _run_folders(child, depth - 1)]


def _config_of(run: Path) -> tuple[str, Path]:
    """Return the config of a run, and the folder of its comparison.

    The config is in the folder of the run or of the comparison.
    """
    home = run.parent.parent if run.parent.name == "runs" else run.parent
    for folder in (run, home):
        if (folder / "config.toml").is_file():
            return (folder / "config.toml").read_text(errors="replace"), home
    return "", home


def _method_order(config: str) -> list[str]:
    """Return the methods in the order of the config, for tables and colours."""
    try:
        listed = tomllib.loads(config).get("compare", {}).get("methods", [])
        return [entry if isinstance(entry, str) else entry["name"] for entry in listed]
    except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError):
        return []


def _in_order(results: Sequence[RunResult], config: str) -> tuple[RunResult, ...]:
    order = _method_order(config)

    def sort_key(result: RunResult) -> tuple[int, int, str]:
        name = result.method.partition("(")[0]
        index = order.index(name) if name in order else len(order)
        # References come last, unless the config lists them.
        return result.seed, index + (result.is_reference and name not in order), result.method

    return tuple(sorted(results, key=sort_key))


def read_timings(runs: Mapping[str, Path]) -> dict[str, Mapping[str, Any]]:
    """Return the content of ``timing.json`` by run name, for folders that have a valid one."""
    timings = {}
    for name, folder in runs.items():
        try:
            timing = json.loads((folder / "timing.json").read_text())
            if timing["rounds"] > 0 and timing["parts"]:
                timings[name] = timing
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return timings


def read_round_times(
    folders: Sequence[Path], results: Sequence[RunResult]
) -> dict[tuple[str, int], tuple[RoundTime, ...]]:
    """Return when the rounds of runs took place, by (method, seed).

    Args:
        folders: folders that may hold a run.
        results: the runs; the times of other runs are left out.
    """
    run_keys, times = {(run.method, run.seed) for run in results}, {}
    for folder in folders:
        try:
            summary = json.loads((folder / "run.json").read_text())
            key = (summary["method"], summary["seed"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if key in run_keys and (rounds := read_times(folder)):
            times[key] = rounds
    return times


@dataclass
class _Draft:
    """A set to which runs are still added: results by (method, seed)."""

    config: str
    home: Path
    results: dict[tuple[str, int], RunResult] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    times: dict[tuple[str, int], tuple[RoundTime, ...]] = field(default_factory=dict)


def find_runs(folders: Sequence[Path]) -> FoundRuns:
    """Find all runs in and below folders, finished or not.

    Runs with the same config form one set, even from different folders, unless the same method and
    seed occurs twice.

    Args:
        folders: folders to search.

    Returns:
        The sets of runs, and notes about runs that could not be read.

    Raises:
        InvalidValueError: a path is not a folder, or contains no run that can be read.
    """
    drafts: list[_Draft] = []
    notes = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise InvalidValueError(
                "RUN_OR_FOLDER", str(folder), "must be a folder that contains runs"
            )
        paths, count = _run_folders(folder), 0
        for path in paths:
            if path.resolve() in seen:
                count += 1
                continue
            try:
                result = load_run(path)
            except InvalidValueError as error:
                notes.append(f"{path} is left out: it {error.allowed}")
                continue
            seen.add(path.resolve())
            count += 1
            _add(drafts, path, result)
        if not count:
            reason = f"must contain a run that can be read ({len(paths)} damaged or just begun)"
            raise InvalidValueError(
                "RUN_OR_FOLDER",
                str(folder),
                reason if paths else "must be or contain the folder of a run",
            )
    sets = [
        RunSet(
            _in_order(list(draft.results.values()), draft.config),
            name=draft.home.resolve().name,
            folder=draft.home.resolve().name,
            config=draft.config,
            timings=read_timings(draft.paths),
            times=draft.times,
        )
        for draft in drafts
    ]
    return FoundRuns(name_sets(sets), tuple(notes))


def _add(drafts: list[_Draft], path: Path, result: RunResult) -> None:
    config, home = _config_of(path)
    key = (result.method, result.seed)
    for draft in drafts:
        if draft.results.get(key) == result:
            return  # the same run is in two folders
        same = draft.config == config if config else draft.home == home
        if same and key not in draft.results:
            break
    else:
        draft = _Draft(config, home)
        drafts.append(draft)
    draft.results[key] = result
    if times := read_times(path):
        draft.times[key] = times
    draft.paths[f"{result.method}, seed {result.seed}"] = path


def name_sets(sets: Sequence[RunSet]) -> tuple[RunSet, ...]:
    """Return the sets with names: the config fields in which they differ, or else the folder."""
    if len(sets) == 1:
        return tuple(sets)
    configs = [flatten_config(one.config) for one in sets]
    keys = list(dict.fromkeys(key for fields in configs for key in fields))
    varied = [key for key in keys if len({repr(fields.get(key)) for fields in configs}) > 1]
    named = []
    for one, fields in zip(sets, configs, strict=True):
        settings = {key: fields.get(key) for key in varied}
        if one.settings:
            settings = dict(one.settings)
        name = settings_text(settings)
        usable = 0 < len(settings) <= _MOST_SETTINGS and len(name) <= _LONGEST_NAME
        named.append(replace(one, settings=settings, name=name if usable else one.name))
    names = [one.name for one in named]
    return tuple(
        one if names.count(one.name) == 1 else replace(one, name=f"{one.name} ({number})")
        for number, one in enumerate(named, start=1)
    )


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return text such as ``training.rounds = 8, seed = 1``; None is shown as ``default``.

    Example:
        >>> settings_text({"training.rounds": 8, "model.name": None})
        'training.rounds = 8, model.name = default'
    """
    return ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if value is None:
        return "default"
    return printable(value) if isinstance(value, str) else json.dumps(value)


def flatten_config(config: str) -> dict[str, Any]:
    """Return the values of a TOML text by dotted field; empty if it is not valid TOML."""
    try:
        content = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
    fields: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            fields |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            fields[key] = value
    return fields
