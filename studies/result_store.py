"""Result files of the studies: JSON lines, one line for each run.

Several processes may add results at the same time, and a killed process leaves a complete file: a
result is added under a lock by replacing the whole file. The lines are sorted by their key, so the
same results give the same bytes whatever the order in which they were computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noisewise.storage import sole_lock, to_json, write_atomic

LOCK_SECONDS = 60.0
Result = dict[str, Any]


@dataclass(frozen=True)
class ResultFile:
    """A file with one JSON object on each line.

    Attributes:
        path: the file; it need not exist.
        key: the fields that together identify a line.
    """

    path: Path
    key: tuple[str, ...]

    def get(self, fields: Mapping[str, Any]) -> Result | None:
        """Return the result with these key fields, or None if it is missing."""
        return self._by_key().get(self.key_of(fields))

    def read(self) -> list[Result]:
        """Return all results, in the order of the file."""
        return list(self._by_key().values())

    def add(self, result: Mapping[str, Any]) -> None:
        """Write a result to the file; it replaces a result with the same key.

        Raises:
            KeyError: if a key field is missing.
            BlockingIOError: if another process holds the lock for more than a minute.
        """
        key = self.key_of(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with sole_lock(self.path.with_name(f".{self.path.name}.lock"), patience=LOCK_SECONDS):
            lines = {k: to_json(line) for k, line in self._by_key().items()}
            lines[key] = to_json(result)
            ordered = sorted(lines, key=json.loads)
            write_atomic(self.path, "".join(f"{lines[k]}\n" for k in ordered).encode())

    def key_of(self, fields: Mapping[str, Any]) -> str:
        """Return the key of a result as JSON text."""
        return json.dumps([_sortable(fields[name]) for name in self.key])

    def _by_key(self) -> Mapping[str, Result]:
        if not self.path.exists():
            return {}
        status = self.path.stat()  # every write makes a new file, so its number or time changes
        version = status.st_ino, status.st_mtime_ns, status.st_size
        return _read(self, version)


def _sortable(value: Any) -> Any:
    """Return the value, or a JSON text in place of a mapping, which has no order."""
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


@lru_cache(maxsize=32)
def _read(file: ResultFile, version: tuple[int, ...]) -> Mapping[str, Result]:
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    return MappingProxyType({file.key_of(line): line for line in lines})
