"""`ServerRun`: a run as a server sees it, round by round, with checkpoints and result files.

The simulator knows every client; a server knows the updates that reach it and nothing else. Both
move the model by the same `server_step`. How updates travel is up to the caller.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Disclosure
from noisewise.aggregation.methods import Method
from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.checkpoint import RunFolder, Snapshot
from noisewise.federation.claims import (
    Declaration,
    load_declarations,
    save_declarations,
)
from noisewise.federation.identity import of_method
from noisewise.federation.results import RoundRecord, RunResult, Status
from noisewise.federation.server import ServerStep, server_step

__all__ = ["PUBLIC_RECORDS", "ServerRun", "Spool", "Survey", "check_needs"]

PUBLIC_RECORDS = "public records"
"""The name under which a server's own evaluation stands in the records."""

Told = Mapping[Disclosure, Mapping[str, float]]
"""What sites told the server's people, by client id: an aggregator's declared needs."""

Score = Callable[[Tensor], float | None]
"""(parameters [p]) -> accuracy on public records, or None."""

Survey = Callable[[Tensor], Mapping[str, float]]
"""(parameters [p]) -> the noised accuracy that sites tell, by client id."""

_DECLARATIONS = "declarations.json"
_log = logging.getLogger(__name__)


def check_needs(method: Method, told: Told) -> None:
    """Refuse what no server may know; say loudly what the method makes sites tell.

    Raises:
        InvalidValueError: for true variances, for a method without privacy, or where a need is
            not met.
    """
    needs = method.aggregator.needs
    if Disclosure.TRUE_VARIANCE in needs:
        raise InvalidValueError(
            "method", method.name, "needs the true noise of each update: for simulations only"
        )
    if not method.private:
        raise InvalidValueError("method", method.name, "has no privacy: for simulations only")
    for need in sorted(needs, key=lambda n: n.value):
        if need not in told:
            allowed = f"must hold {need.value} by client id, which {method.name} needs"
            raise InvalidValueError("told", sorted(n.value for n in told), allowed)
        _log.warning(
            "%s makes every site tell the server its %s, and believes what it is told; "
            "RobustHDP and NoiseWise need neither",
            method.name,
            need.value,
        )


class Spool:
    """Updates on disk while a round goes on: one float32 row for each, written as it comes.

    Then the only copy in memory is the matrix that the aggregator reads: 4 p n bytes, plus one
    reply at a time.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._place = tempfile.TemporaryDirectory(prefix="updates-", dir=folder)
        self._files: dict[str, Path] = {}

    def add(self, client: str, update: Tensor) -> None:
        """Keep the update [p] of a client."""
        path = Path(self._place.name) / f"{len(self._files)}.f4"
        update.detach().numpy().tofile(path)
        self._files[client] = path

    def updates(self) -> Mapping[str, Tensor]:
        """All updates by client id; each is read from disk when it is asked for, and not kept."""
        return _Rows(dict(self._files))

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, client: str) -> bool:
        return client in self._files

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *details: object) -> None:
        self._place.cleanup()


@dataclass(frozen=True)
class _Rows(Mapping[str, Tensor]):
    """Updates that lie on disk."""

    files: Mapping[str, Path]

    def __getitem__(self, client: str) -> Tensor:
        return torch.from_numpy(np.fromfile(self.files[client], dtype=np.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class _Some(Mapping[str, Tensor]):
    """Some of the updates, in order."""

    updates: Mapping[str, Tensor]
    clients: tuple[str, ...]

    def __getitem__(self, client: str) -> Tensor:
        if client not in self.clients:
            raise KeyError(client)
        return self.updates[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


class ServerRun:
    """The state of a server over the rounds of one run.

    Args:
        method: settled; what it needs must be in ``told``.
        theta: [p] initial parameters; a folder with a part of the run knows better.
        rounds: planned.
        folder: for checkpoints and results as the simulator writes them, so that `noisewise report`
            reads them; None keeps everything in memory.
        told: see `Told`.
        min_clients: with fewer sound updates the model stays as it is.
        seed: of the choice of clients.
        identity: of the model, such as names and shapes; a folder of another one is refused.
        settings: noted in the result.
    """

    def __init__(
        self,
        method: Method,
        theta: Tensor,
        *,
        rounds: int,
        folder: Path | None = None,
        told: Told | None = None,
        min_clients: int = 2,
        seed: int = 0,
        identity: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        positive_int("min_clients", min_clients)
        positive_int("rounds", rounds)
        self.method, self.rounds, self.seed = method, rounds, seed
        self._told, self._min = dict(told or {}), min_clients
        check_needs(method, self._told)
        self._settings = {
            "rounds": rounds,
            "deployed": True,
            "noise_floor": getattr(getattr(method.aggregator, "guard", None), "floor", None),
            **(settings or {}),
        }
        self.snapshot, self.records = Snapshot(0, theta, {}, {}), list[RoundRecord]()
        self.status: Status = "unfinished"
        self.declarations: dict[str, Declaration] = {}
        self._files = None
        if folder is not None:
            mark = hashlib.sha256(json.dumps([*of_method(method), identity]).encode())
            self._files = RunFolder(folder, mark.hexdigest())
            self._resume(theta)

    @property
    def folder(self) -> Path | None:
        """Where the run writes."""
        return None if self._files is None else self._files.path

    @property
    def ended(self) -> bool:
        """Whether no round is left, or the model became NaN or infinite."""
        return self.snapshot.round >= self.rounds or self.status == "diverged"

    def _resume(self, theta: Tensor) -> None:
        assert self._files is not None
        resumed = self._files.resume()
        if resumed is not None and any(record.changed for record in resumed[1]):
            self.snapshot, self.records = resumed[0], list(resumed[1])
            _log.warning("%s: going on after round %d", self._files.path, self.snapshot.round)
        elif resumed is not None:
            # The same instruction as before: a site that answered it sends its stored reply.
            self.snapshot = Snapshot(0, resumed[0].theta, {}, {})
            self._files.start_again()
            _log.warning(
                "%s: none of its %d rounds changed the model: starting again with round 1",
                self._files.path,
                len(resumed[1]),
            )
        self.declarations = load_declarations(self._files.path / _DECLARATIONS)
        if not self.ended:
            self._files.result_file.unlink(missing_ok=True)
        self._files.begin(self.result().summary() | {"status": "unfinished"})

    def note_declarations(self, declared: Mapping[str, Declaration]) -> None:
        """Keep what sites declare, by client id. It is repeated in the result and never checked."""
        if not declared:
            return
        self.declarations |= declared
        if self._files:
            save_declarations(self._files.path / _DECLARATIONS, self.declarations)
            self._files.begin(self.result().summary() | {"status": "unfinished"})

    def play(
        self,
        updates: Mapping[str, Tensor],
        absent: Mapping[str, str],
        score: Score | None = None,
        survey: Survey | None = None,
    ) -> ServerStep:
        """One round: aggregate, move the model, note it down, checkpoint.

        Args:
            updates: [p] by client id.
            absent: clients that were asked and gave no update that could be read, and why.
            score: evaluates the released parameters.
            survey: asks sites about them, if the model moved: the same question costs them twice.
        """
        untold = self._untold(updates)
        known = _Some(updates, tuple(client for client in updates if client not in untold))
        absent = {**absent, **untold}
        if len(known) < self._min:
            why = f"{len(known)} of at least {self._min} updates: the model stays as it was"
            absent = {**dict.fromkeys(known, why), **absent}
            known = _Some(updates, ())
            _log.error("round %d: %s", self.snapshot.round + 1, why)
        step = self._step(known)
        dropped = {**step.dropped, **absent}
        for client, reason in sorted(dropped.items()):
            _log.warning("round %d: client %s %s", step.snapshot.round, client, reason)
        self.snapshot = step.snapshot
        found = score(step.snapshot.released) if score is not None else None
        told = survey(step.snapshot.released) if survey is not None and step.answer else None
        record = replace(_record(step, dropped, found), noised_accuracy=told)
        self.records.append(record)
        if self._files:
            self._files.save(self.snapshot, record)
        if not bool(torch.isfinite(self.snapshot.theta).all()):
            self.status = "diverged"
        return step

    def _step(self, known: Mapping[str, Tensor]) -> ServerStep:
        try:
            return server_step(self.method, self.snapshot, known, self._disclose)
        except NoisewiseError as error:  # too few updates for a guard, say: no reason to end a run
            waiting = replace(self.snapshot, round=self.snapshot.round + 1)
            _log.error("round %d: %s; the model stays as it was", waiting.round, error)
            return ServerStep(waiting, dropped=dict.fromkeys(known, str(error)), failure="refused")
        except Exception as error:
            step = self._step_without_one(known, type(error).__name__[:60])
            if step is None:
                raise
            return step

    def _step_without_one(self, known: Mapping[str, Tensor], error: str) -> ServerStep | None:
        """The step without the one update on which the aggregator fails; None if there is none.

        An aggregator or estimator may be anybody's and may fail on an update that passes the
        screening. Its sender would end the run, and every restarted one.
        """
        if len(known) <= self._min:
            return None
        for culprit in known:
            others = _Some(known, tuple(client for client in known if client != culprit))
            try:
                step = server_step(self.method, self.snapshot, others, self._disclose)
            except Exception:
                _log.debug("the aggregator also fails without %s", culprit, exc_info=True)
                continue
            why = f"sent an update on which {self.method.name} fails ({error})"
            return replace(step, dropped={**step.dropped, culprit: why})
        return None

    @property
    def changed(self) -> bool:
        """Whether any round changed the model."""
        return any(record.changed for record in self.records)

    def finish(self) -> RunResult:
        """Write the result, and the model if any round changed it."""
        if not self.changed:
            self.status = "no_updates"
        elif self.status == "unfinished" and self.snapshot.round >= self.rounds:
            self.status = "finished"
        result = self.result()
        if self._files:
            self._files.finish(result.summary(), self.snapshot.released if self.changed else None)
        return result

    def result(self) -> RunResult:
        """What is known so far."""
        seen = sorted(
            {c for r in self.records for c in (*r.weights, *r.dropped)} | {*self.declarations}
        )
        return RunResult(
            method=self.method.name,
            seed=self.seed,
            status=self.status,
            rounds=tuple(self.records),
            clients={client: self._client(client) for client in seen},
            guarantee=None,
            settings=self._settings,
            needs=tuple(sorted(need.value for need in self.method.aggregator.needs)),
        )

    def _client(self, client: str) -> dict[str, Any]:
        """What the server knows about a site: no budget, at most what the site declares."""
        declared = self.declarations.get(client)
        return {"declared": None if declared is None else asdict(declared)}

    def _untold(self, clients: Iterable[str]) -> dict[str, str]:
        """Clients without which a declared need cannot be met, and which it is."""
        return {
            client: f"has not told its {need.value}"
            for need in self.method.aggregator.needs
            for client in clients
            if client not in self._told[need]
        }

    def _disclose(self, ids: tuple[str, ...]) -> dict[Disclosure, NDArray[np.float64]]:
        return {
            need: np.array([self._told[need][client] for client in ids], dtype=np.float64)
            for need in self.method.aggregator.needs
        }


def _record(step: ServerStep, dropped: Mapping[str, str], score: float | None) -> RoundRecord:
    """A round as the server knows it: no true noise, no epsilon, no client's accuracy."""
    answer = step.answer
    weights = dict(zip(step.ids, map(float, answer.weights), strict=True)) if answer else {}
    estimate = answer.noise if answer else None
    weighed = [client for client in step.ids if client not in step.dropped]
    return RoundRecord(
        round=step.snapshot.round,
        weights=weights,
        dropped=dict(sorted(dropped.items())),
        noise_estimate=(
            dict(zip(weighed, map(float, estimate.variance), strict=True)) if estimate else None
        ),
        noise_converged=bool(estimate.converged) if estimate else None,
        true_noise={},
        aggregate_noise=None,
        oracle_noise=None,
        epsilon_spent={},
        accuracy=None if score is None or not math.isfinite(score) else {PUBLIC_RECORDS: score},
    )
