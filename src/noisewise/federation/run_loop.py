"""`RunLoop`: a run from its first round to its result files, for the simulator and for servers.

The driver (`simulate` or a server) knows where updates come from. In each round it makes a
`ServerStep` of `RunLoop.snapshot` and the updates, makes a `RoundRecord` of the step, and passes
the new snapshot and the record to `RunLoop.save`. The run loop knows which round is next, what is
on disk, and how the run ends.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from noisewise.aggregation.auto_steps import AUTO
from noisewise.aggregation.methods import Method
from noisewise.errors import InvalidValueError
from noisewise.federation.checkpoint import RunFolder, Snapshot
from noisewise.federation.result_facts import ClientFacts, RunSettings
from noisewise.federation.results import RunResult, Status
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.task_info import TaskInfo
from noisewise.federation.trained_model import ModelStructure, TrainedModel
from noisewise.privacy.declaration import Declaration, load_declarations, save_declarations

__all__ = ["NOT_FINITE", "RunLoop", "StopWhen", "released_part", "result_before_training"]

NOT_FINITE = "not finite"
"""Why a simulated round drops all updates if local training overflowed at every client."""

StopWhen = Callable[[RoundRecord, Tensor], bool]
"""(what a server knows of the last round, released parameters [p]) -> whether the run ends."""

_DECLARATIONS = "declarations.json"
_log = logging.getLogger(__name__)


def released_part(record: RoundRecord) -> RoundRecord:
    """The record with what a server knows only: weights, dropped updates and noise estimates.

    A simulator also records scores, losses and budgets of the clients. Those are computed from
    private records: a run that ended by them would disclose them.
    """
    return RoundRecord(
        round=record.round,
        weights=dict(record.weights),
        dropped=dict(record.dropped),
        drop_kinds=dict(record.drop_kinds),
        noise_estimate=record.noise_estimate,
        noise_converged=record.noise_converged,
        noised_accuracy=record.noised_accuracy,
    )


def _asks_to_stop(stop_when: StopWhen, record: RoundRecord, released: Tensor) -> bool:
    """The answer of ``stop_when``.

    Raises:
        InvalidValueError: it raises, or does not return True or False.
    """
    try:
        stop: object = stop_when(released_part(record), released.clone())
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        allowed = f"must take a round and the released parameters ({reason})"
        raise InvalidValueError("stop_when", f"raised in round {record.round}", allowed) from error
    if not isinstance(stop, bool):
        raise InvalidValueError("stop_when", type(stop).__name__, "must return True or False")
    return stop


def _check_stop_when(stop_when: StopWhen) -> None:
    """Refuse, before the first round, a function that does not take two arguments.

    It is not called: it may count its calls.
    """
    try:
        inspect.signature(stop_when).bind(None, None)
    except TypeError as error:
        allowed = f"must take a round and the released parameters ({error})"
        raise InvalidValueError("stop_when", getattr(stop_when, "__name__", ""), allowed) from error
    except ValueError:  # a built-in without a signature
        return


def result_before_training(
    method: Method,
    seed: int,
    settings: RunSettings,
    *,
    clients: Mapping[str, ClientFacts] | None = None,
    guarantee: Mapping[str, float] | None = None,
    deployed: bool = False,
    task: TaskInfo | None = None,
) -> RunResult:
    """The result of a run before its first round.

    Args:
        method: with its server steps, see `Method.with_server_steps`.
        seed: of the run.
        settings: with ``rounds``, the planned number of rounds.
        clients: what is known about each client; None if a server will learn who takes part.
        guarantee: overall (epsilon, delta), if the run knows it.
        deployed: whether the clients are real sites.
        task: of the run; by default a classification.
    """
    if method.auto is not None:
        settings = {**settings, "server_rate": AUTO}
    if method.schedule is not None:
        settings = {**settings, "schedule": asdict(method.schedule)}
    if method.optimiser is not None:
        settings = {**settings, "server_optimiser": asdict(method.optimiser)}
    return RunResult(
        method=method.name,
        seed=seed,
        status="unfinished",
        rounds=(),
        clients=clients or {},
        guarantee=guarantee,
        settings=settings,
        needs=tuple(sorted(need.value for need in method.needs)),
        deployed=deployed,
        shares_model=method.shares_model,
        task=task or TaskInfo(),
    )


class RunLoop:
    """The state of one run: begin or resume, save each round, finish.

    Args:
        before: see `result_before_training`.
        theta: [p] initial parameters; those of a checkpoint take precedence.
        structure: gives the parameters their names.
        files: the run's folder, which is resumed; None keeps everything in memory.
        stop_when: ends the run; see `StopWhen`.

    Attributes:
        snapshot: the state that the next round starts from.
        records: of all rounds so far, in order.
        status: ``unfinished`` until the run has ended. A driver sets ``budgets_spent``.
        declarations: what sites of a deployed run declare, by client id.

    Raises:
        InvalidValueError: the folder belongs to another run.
    """

    def __init__(
        self,
        before: RunResult,
        theta: Tensor,
        structure: ModelStructure,
        files: RunFolder | None = None,
        stop_when: StopWhen | None = None,
    ) -> None:
        if stop_when is not None:
            _check_stop_when(stop_when)
        self._stop_when = stop_when
        self._before, self._structure, self._files = before, structure, files
        self.snapshot = Snapshot(0, theta, {}, dict.fromkeys(before.clients, 0))
        self.records: list[RoundRecord] = []
        self.status: Status = "unfinished"
        self.declarations: dict[str, Declaration] = {}
        if files is not None:
            self._resume(files)

    @property
    def next_round(self) -> int:
        """Number of the next round, counted from 1."""
        return self.snapshot.round + 1

    @property
    def ended(self) -> bool:
        """Whether no round is left to play."""
        return self.status != "unfinished" or self.snapshot.round >= self._before.settings["rounds"]

    @property
    def changed(self) -> bool:
        """Whether any round changed the model."""
        return any(record.changed for record in self.records)

    def _resume(self, files: RunFolder) -> None:
        resumed = files.resume()
        if resumed is not None:
            snapshot, records = resumed[0].to(self.snapshot.theta), resumed[1]
            if self._before.deployed and not any(record.changed for record in records):
                # The same instruction as before: a site that answered it sends its stored reply.
                self.snapshot = replace(self.snapshot, theta=snapshot.theta)
                files.delete_rounds()
                _log.warning(
                    "%s: none of its %d rounds changed the model: the run starts again with "
                    "round 1",
                    files.path,
                    len(records),
                )
            else:
                self._check_length(snapshot.round, files)
                self.snapshot, self.records = snapshot, list(records)
                self._check_end()
                _log.info("%s: resuming after round %d", files.path, snapshot.round)
        self.declarations = load_declarations(files.path / _DECLARATIONS)
        if not self.ended:
            files.result_file.unlink(missing_ok=True)
        self._write_start(files)

    def _check_length(self, done: int, files: RunFolder) -> None:
        """Refuse a simulation that asks for fewer rounds than are done."""
        rounds = self._before.settings["rounds"]
        if done > rounds and not self._before.deployed:
            allowed = f"{files.path} has {done} rounds; give at least that many, or another folder"
            raise InvalidValueError("training.rounds", rounds, allowed)

    def _write_start(self, files: RunFolder) -> None:
        files.begin(replace(self.result(), status="unfinished", rounds=()).summary())

    def declare(self, declarations: Mapping[str, Declaration]) -> None:
        """Keep what sites declare, by client id. The result repeats it; no server can check it."""
        if not declarations:
            return
        self.declarations |= declarations
        if self._files is not None:
            save_declarations(self._files.path / _DECLARATIONS, self.declarations)
            self._write_start(self._files)

    def save(self, snapshot: Snapshot, record: RoundRecord) -> None:
        """Close a round: keep its record and write a checkpoint.

        Args:
            snapshot: the state after the round.
            record: of the round.

        Raises:
            DiskFullError: there is no room; the checkpoint of the round before stays valid.
        """
        self.snapshot = snapshot
        self.records.append(record)
        if self._files is not None:
            self._files.save(snapshot, record)
        self._check_end()

    def _check_end(self) -> None:
        """Set the status if the last round made the run diverge, or if ``stop_when`` says so."""
        self._check_divergence()
        if self._stop_when is None or self.status != "unfinished" or not self.records:
            return
        if _asks_to_stop(self._stop_when, self.records[-1], self.snapshot.released):
            self.status = "stopped"

    def _check_divergence(self) -> None:
        """Set the status if the last round made the parameters or the loss NaN or infinite."""
        record, theta = self.records[-1], self.snapshot.theta
        if not record.changed:
            diverged = set(record.dropped.values()) == {NOT_FINITE}
        else:
            loss_is_finite = record.train_loss is None or math.isfinite(record.mean_train_loss)
            diverged = not loss_is_finite or not bool(torch.isfinite(theta).all())
        if diverged:
            self.status = "diverged"

    def finish(self) -> RunResult:
        """Write the result, and the model unless no round changed it."""
        if not self.changed and self.status != "diverged":
            self.status = "no_updates"
        elif self.ended and self.status == "unfinished":
            self.status = "finished"
        result = self.result()
        if self._files is not None:
            self._files.finish(result.summary(), result.trained)
        return result

    def result(self) -> RunResult:
        """What is known so far."""
        clients = self._sites() if self._before.deployed else self._before.clients
        return replace(
            self._before,
            status=self.status,
            rounds=tuple(self.records),
            clients=clients,
            trained=self._trained() if self.changed or self.status == "diverged" else None,
        )

    def _trained(self) -> TrainedModel:
        return TrainedModel(self.snapshot.released, self._structure)

    def _sites(self) -> dict[str, ClientFacts]:
        """What a server knows about each site: no budget, at most what the site declares."""
        seen = {client for record in self.records for client in (*record.weights, *record.dropped)}
        declared = {client: asdict(claim) for client, claim in self.declarations.items()}
        return {
            client: ClientFacts(declared=declared.get(client))
            for client in sorted(seen | declared.keys())
        }
