"""Runs on disk, for reports: found below folders, told apart by their configs."""

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
from noisewise.text import printable

__all__ = ["Found", "RunSet", "find_runs", "name_sets", "read_timings", "words_of"]

_MARKS = ("run.json", "rounds.jsonl")
_DEPTH = 6
_MOST_SETTINGS, _LONGEST_NAME = 3, 120


@dataclass(frozen=True)
class RunSet:
    """Runs that belong side by side: the same config, other methods and seeds.

    Attributes:
        results: the runs, seed by seed.
        name: what tells it from other sets of the same report.
        config: TOML text, empty where unknown.
        timings: content of ``timing.json`` by run, where it was measured.
        settings: config fields in which it differs from the other sets, dotted.
        folder: name of the folder that it lies in.
    """

    results: tuple[RunResult, ...]
    name: str = ""
    config: str = ""
    timings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""

    @property
    def slug(self) -> str:
        """The name as a part of file names and ids."""
        return re.sub(r"[^A-Za-z0-9.=]+", "-", self.name).strip("-") or "runs"


@dataclass(frozen=True)
class Found:
    """Sets of runs, and a line about each run that could not be read."""

    sets: tuple[RunSet, ...]
    notes: tuple[str, ...]


def _is_run(folder: Path) -> bool:
    """Whether a run was begun here; `noisewise reproduce` writes a ``result.json`` of its own."""
    if any((folder / mark).is_file() for mark in _MARKS):
        return True
    try:
        result = json.loads((folder / "result.json").read_text())
    except OSError:
        return False
    except ValueError:
        return True  # damaged, to be told
    return not (isinstance(result, dict) and "artefact" in result)


def _below(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """Run folders in or below a folder; a run's own subfolders are not searched."""
    if _is_run(folder):
        return [folder]
    if depth == 0:
        return []
    children = sorted(child for child in folder.iterdir() if child.is_dir())
    return [run for child in children for run in _below(child, depth - 1)]


def _config_of(run: Path) -> tuple[str, Path]:
    """The config of a run, from its folder or from that of its comparison, and the latter."""
    home = run.parent.parent if run.parent.name == "runs" else run.parent
    for folder in (run, home):
        if (folder / "config.toml").is_file():
            return (folder / "config.toml").read_text(errors="replace"), home
    return "", home


def _method_order(config: str) -> list[str]:
    """Names of the methods as the config lists them, for the order of tables and colours."""
    try:
        listed = tomllib.loads(config).get("compare", {}).get("methods", [])
        return [entry if isinstance(entry, str) else entry["name"] for entry in listed]
    except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError):
        return []


def _in_order(results: Sequence[RunResult], config: str) -> tuple[RunResult, ...]:
    order = _method_order(config)
    references = ["FedAvg", "Oracle"]  # where the config has no list: after the others

    def place(result: RunResult) -> tuple[int, int, str]:
        name = result.method.partition("(")[0]
        where = order.index(name) if name in order else len(order)
        return result.seed, where + (name in references and name not in order), result.method

    return tuple(sorted(results, key=place))


def read_timings(runs: Mapping[str, Path]) -> dict[str, Mapping[str, Any]]:
    """``timing.json`` of each named run folder that has a sound one."""
    found = {}
    for name, folder in runs.items():
        try:
            timing = json.loads((folder / "timing.json").read_text())
            if timing["rounds"] > 0 and timing["parts"]:
                found[name] = timing
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


@dataclass
class _Draft:
    """A set in the making: results by (method, seed)."""

    config: str
    home: Path
    results: dict[tuple[str, int], RunResult] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def find_runs(folders: Sequence[Path]) -> Found:
    """All runs in and below the folders, finished or not.

    Runs under one config belong together, wherever they lie, unless a method and seed come twice.

    Raises:
        InvalidValueError: if a path is no folder, or holds no run that can be read.
    """
    drafts: list[_Draft] = []
    notes = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise InvalidValueError("RUN_OR_FOLDER", str(folder), "must be a folder with runs")
        paths, count = _below(folder), 0
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
            reason = f"must hold a run that can be read ({len(paths)} damaged or just begun)"
            raise InvalidValueError(
                "RUN_OR_FOLDER", str(folder), reason if paths else "must be or hold a run's folder"
            )
    sets = [
        RunSet(
            _in_order(list(draft.results.values()), draft.config),
            name=draft.home.resolve().name,
            folder=draft.home.resolve().name,
            config=draft.config,
            timings=read_timings(draft.paths),
        )
        for draft in drafts
    ]
    return Found(name_sets(sets), tuple(notes))


def _add(drafts: list[_Draft], path: Path, result: RunResult) -> None:
    config, home = _config_of(path)
    key = (result.method, result.seed)
    for draft in drafts:
        if draft.results.get(key) == result:
            return  # the same run in two places
        same = draft.config == config if config else draft.home == home
        if same and key not in draft.results:
            break
    else:
        draft = _Draft(config, home)
        drafts.append(draft)
    draft.results[key] = result
    draft.paths[f"{result.method}, seed {result.seed}"] = path


def name_sets(sets: Sequence[RunSet]) -> tuple[RunSet, ...]:
    """Name each set by the config fields in which the sets differ, else by its folder."""
    if len(sets) == 1:
        return tuple(sets)
    flat = [_flat(one.config) for one in sets]
    keys = list(dict.fromkeys(key for fields in flat for key in fields))
    varied = [key for key in keys if len({repr(fields.get(key)) for fields in flat}) > 1]
    named = []
    for one, fields in zip(sets, flat, strict=True):
        settings = {key: fields.get(key) for key in varied}
        if one.settings:
            settings = dict(one.settings)
        told = words_of(settings)
        usable = 0 < len(settings) <= _MOST_SETTINGS and len(told) <= _LONGEST_NAME
        named.append(replace(one, settings=settings, name=told if usable else one.name))
    names = [one.name for one in named]
    return tuple(
        one if names.count(one.name) == 1 else replace(one, name=f"{one.name} ({number})")
        for number, one in enumerate(named, start=1)
    )


def words_of(settings: Mapping[str, Any]) -> str:
    """``training.rounds = 8, seed = 1``, with a missing field as its default."""
    return ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if value is None:
        return "default"
    return printable(value) if isinstance(value, str) else json.dumps(value)


def _flat(config: str) -> dict[str, Any]:
    """Dotted field -> value of a TOML text; empty where it is none."""
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
