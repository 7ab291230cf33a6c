"""Checkpoints that survive kill -9 and detect damage (docs/privacy.md, guarantees 12 and 13).

A checkpoint is one file: a line that names the format, the SHA-256 of the rest, then safetensors
with the model and the aggregator's arrays. The records of the rounds are in ``rounds.jsonl``. A
checkpoint holds the length and the SHA-256 of the records that belong to it, so that both files
agree after a crash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from noisewise.aggregation.base import State
from noisewise.errors import InvalidValueError
from noisewise.federation.results import RunResult, load_result
from noisewise.federation.round_record import RoundRecord, read_record
from noisewise.federation.round_times import TIMES_FILE, RoundTime, append_time
from noisewise.federation.trained_model import MODEL_FILE, TrainedModel
from noisewise.storage import lock_is_held, sole_lock, to_json, write_atomic, writing

__all__ = ["RunFolder", "Snapshot", "alone_in", "is_training"]

_MAGIC = b"noisewise checkpoint 1\n"
_LOCK = ".training.lock"
_KEPT = 2  # checkpoints of a run; older ones are deleted
_PATIENCE = 5.0  # seconds to wait for the lock; workers of a killed comparison end within one
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Everything that the next round depends on.

    Attributes:
        round: number of rounds that are done.
        theta: [p] global parameters.
        state: of the aggregator.
        rounds_done: rounds of each client, for its budget.
        average: [p] moving average of the global parameters, if the method releases it.
    """

    round: int
    theta: Tensor
    state: State
    rounds_done: Mapping[str, int]
    average: Tensor | None = None

    @property
    def released(self) -> Tensor:
        """The parameters to use: the average if there is one."""
        return self.theta if self.average is None else self.average

    def to(self, theta: Tensor) -> Snapshot:
        """The same state with the device and type of ``theta``."""
        average = None if self.average is None else self.average.to(theta)
        return replace(self, theta=self.theta.to(theta), average=average)

    def counting(self, clients: Iterable[str]) -> Snapshot:
        """The same state with one more round done by each of these clients."""
        more = {client: self.rounds_done.get(client, 0) + 1 for client in clients}
        return replace(self, rounds_done={**self.rounds_done, **more})


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Hold the lock of a run's folder: no other process or thread trains this run meanwhile.

    Args:
        folder: of the run; None for a run that writes nothing and needs no lock.

    Raises:
        InvalidValueError: another process or thread holds the lock.
    """
    if folder is None:
        yield
        return
    lock = folder / _LOCK
    with ExitStack() as held:
        try:
            with writing(lock):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(sole_lock(lock, _PATIENCE))
        except BlockingIOError as error:
            raise InvalidValueError(
                "output",
                str(folder),
                "another process is training this run; wait until it has ended, or choose "
                "another folder (--output)",
            ) from error
        yield


def is_training(folder: Path) -> bool | None:
    """Whether another process trains the run in a folder now; None if the system cannot detect it.

    It only asks: no lock is taken, so a run that starts at this moment is not disturbed.
    """
    return lock_is_held(folder / _LOCK)


@dataclass
class RunFolder:
    """The files of one run: checkpoints, records, result.

    Args:
        path: folder of the run.
        fingerprint: of everything that decides the result; the folder of another run is refused.
        older: the fingerprint that earlier versions wrote for the same run; it is accepted too.
    """

    path: Path
    fingerprint: str
    older: str | None = None
    _length: int = field(default=0, init=False)
    _digest: Any = field(default_factory=hashlib.sha256, init=False)
    _began: float = field(default_factory=time.time, init=False)

    @property
    def records_file(self) -> Path:
        """One JSON line for each round."""
        return self.path / "rounds.jsonl"

    @property
    def result_file(self) -> Path:
        """The summary, written when the run has ended."""
        return self.path / "result.json"

    @property
    def start_file(self) -> Path:
        """The summary before the first round, for reports on unfinished runs."""
        return self.path / "run.json"

    def begin(self, summary: Mapping[str, Any]) -> None:
        """Write the summary before the first round."""
        write_atomic(self.start_file, (to_json(summary, indent=1) + "\n").encode())

    def finish(self, summary: Mapping[str, Any], trained: TrainedModel | None) -> None:
        """Write the model, then the summary, whose presence marks the run as ended.

        Args:
            summary: of the run.
            trained: the trained model; None if no round changed the model.
        """
        if trained is None:
            (self.path / MODEL_FILE).unlink(missing_ok=True)
        else:
            trained.write(self.path)
        self.records_file.touch()  # a run may end before its first round
        content = {**summary, "fingerprint": self.fingerprint}
        write_atomic(self.result_file, (to_json(content, indent=1) + "\n").encode())

    def finished(self) -> RunResult | None:
        """The result, if the folder holds the whole run; None if it is missing or damaged.

        Raises:
            InvalidValueError: the folder belongs to another run.
        """
        if not self.result_file.exists():
            return None
        try:
            fingerprint = json.loads(self.result_file.read_text()).get("fingerprint")
        except (ValueError, AttributeError):
            return None  # damaged: resume from the checkpoints
        self._check(fingerprint)
        try:
            return load_result(self.path)
        except InvalidValueError as error:
            _log.warning("%s: %s; resuming from the checkpoints", self.path, error.allowed)
            return None

    def _check(self, fingerprint: object) -> None:
        if fingerprint is None or fingerprint not in (self.fingerprint, self.older):
            raise InvalidValueError(
                "output",
                str(self.path),
                "contains a run with other settings or with an earlier version of your own code; "
                "choose another folder (--output) or remove it",
            )

    def save(self, snapshot: Snapshot, record: RoundRecord) -> None:
        """Append the round's record, then write the checkpoint that includes it.

        Raises:
            InvalidValueError: records that were written are missing.
            DiskFullError: the disk is full; the checkpoint of the round before stays valid.
        """
        self.append(record)
        write_atomic(self._file(snapshot.round), self._encode(snapshot))
        for old in self._checkpoints()[:-_KEPT]:
            old.unlink(missing_ok=True)

    def append(self, record: RoundRecord) -> None:
        """Append a round's record and its time without a checkpoint.

        Raises:
            InvalidValueError: records that were written are missing.
            DiskFullError: the disk is full.
        """
        line = (to_json(_fields(record)) + "\n").encode()
        with writing(self.records_file):
            self._append(line)
        self._length += len(line)
        self._digest.update(line)
        ended = time.time()
        append_time(self.path, RoundTime(record.round, self._began, ended))
        self._began = ended

    def _append(self, line: bytes) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.records_file, "ab") as file:
            if os.fstat(file.fileno()).st_size < self._length:  # truncate would fill it with zeros
                raise InvalidValueError(
                    "output",
                    str(self.path),
                    f"{self.records_file.name} has become shorter while the run was training: "
                    "another program writes there; run the same command again to resume from a "
                    "checkpoint",
                )
            file.truncate(self._length)  # remove what a crash left after the last checkpoint
            file.seek(self._length)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def resume(self) -> tuple[Snapshot, tuple[RoundRecord, ...]] | None:
        """The newest valid checkpoint with its records; None to start from the beginning.

        Raises:
            InvalidValueError: the folder belongs to another run.
        """
        for temporary in (*self.path.glob(".*.tmp"), *self.path.glob("checkpoints/.*.tmp")):
            temporary.unlink(missing_ok=True)  # of a process that was killed while it wrote
        for file in reversed(self._checkpoints()):
            try:
                snapshot, records = self._decode(file)
            except InvalidValueError:
                raise
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                _log.warning("%s is damaged (%s); trying the previous checkpoint", file, error)
                continue
            return snapshot, records
        self._length, self._digest = 0, hashlib.sha256()
        return None

    def delete_rounds(self) -> None:
        """Delete all rounds: the next one is round 1."""
        for file in reversed(self._checkpoints()):  # a crash in between leaves an older valid one
            file.unlink()
        self.records_file.unlink(missing_ok=True)
        (self.path / TIMES_FILE).unlink(missing_ok=True)
        self._length, self._digest = 0, hashlib.sha256()

    def _file(self, number: int) -> Path:
        return self.path / "checkpoints" / f"round-{number:06d}.ckpt"

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.ckpt"))

    def _encode(self, snapshot: Snapshot) -> bytes:
        tensors = {"theta": snapshot.theta.detach().cpu().contiguous()}
        if snapshot.average is not None:
            tensors["average"] = snapshot.average.detach().cpu().contiguous()
        words: dict[str, list[str]] = {}
        for name, array in snapshot.state.items():
            if array.dtype.kind == "U":
                words[name] = [str(item) for item in array]
            else:
                tensors[f"state.{name}"] = torch.from_numpy(np.array(array, dtype=np.float64))
        header = {
            "round": snapshot.round,
            "words": words,
            "rounds_done": dict(snapshot.rounds_done),
            "fingerprint": self.fingerprint,
            "records_length": self._length,
            "records_sha256": self._digest.hexdigest(),
        }
        payload = save_tensors(tensors, metadata={"noisewise": to_json(header)})
        return _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload

    def _decode(self, file: Path) -> tuple[Snapshot, tuple[RoundRecord, ...]]:
        content = file.read_bytes()
        if not content.startswith(_MAGIC):
            raise ValueError("not a checkpoint")
        expected, _, payload = content[len(_MAGIC) :].partition(b"\n")
        if hashlib.sha256(payload).hexdigest().encode() != expected:
            raise ValueError("SHA-256 does not match")
        header = json.loads(_metadata(payload)["noisewise"])
        self._check(header["fingerprint"])
        with open(self.records_file, "rb") as records_file:
            lines = records_file.read(header["records_length"])
        digest = hashlib.sha256(lines)
        if digest.hexdigest() != header["records_sha256"]:
            raise ValueError(f"{self.records_file.name} does not match")
        tensors = load_tensors(payload)
        state: dict[str, NDArray[Any]] = {
            name.removeprefix("state."): tensor.numpy()
            for name, tensor in tensors.items()
            if name.startswith("state.")
        }
        state |= {name: np.array(items, dtype=np.str_) for name, items in header["words"].items()}
        self._length, self._digest = header["records_length"], digest
        records = tuple(read_record(line) for line in lines.splitlines())
        snapshot = Snapshot(
            header["round"],
            tensors["theta"],
            state,
            header["rounds_done"],
            tensors.get("average"),
        )
        return snapshot, records


def _metadata(payload: bytes) -> dict[str, str]:
    """The metadata of safetensors bytes: an 8-byte length, then a JSON header."""
    length = int.from_bytes(payload[:8], "little")
    metadata: dict[str, str] = json.loads(payload[8 : 8 + length])["__metadata__"]
    return metadata


def _fields(record: RoundRecord) -> dict[str, Any]:
    fields = dict(vars(record))
    if not record.drop_kinds:
        del fields["drop_kinds"]
    return fields
