"""`RunLoop`: a run from its first round to its result files, for the simulator and for servers.

The driver (`simulate` or a server) knows where updates come from. In each round it makes a
`ServerStep` of `RunLoop.snapshot` and the updates, makes a `RoundRecord` of the step, and passes
the new snapshot and the record to `RunLoop.save`. The run loop knows which round is next, what is
on disk, and how the run ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from noisewise.aggregation.auto_steps import AUTO
from noisewise.aggregation.methods import Method
from noisewise.federation.checkpoint import RunFolder, Snapshot
from noisewise.federation.results import (
    ClientFacts,
    RoundRecord,
    RunResult,
    RunSettings,
    Status,
)
from noisewise.privacy.declaration import Declaration, load_declarations, save_declarations

__all__ = ["NOT_FINITE", "RunLoop", "result_before_training"]

NOT_FINITE = "not finite"
"""Why a simulated round drops all updates if local training overflowed at every client."""

_DECLARATIONS = "declarations.json"
_log = logging.getLogger(__name__)


def result_before_training(
    method: Method,
    seed: int,
    settings: RunSettings,
    *,
    clients: Mapping[str, ClientFacts] | None = None,
    guarantee: Mapping[str, float] | None = None,
    deployed: bool = False,
) -> RunResult:
    """The result of a run before its first round.

    Args:
        method: with its server steps, see `Method.with_server_steps`.
        seed: of the run.
        settings: with ``rounds``, the planned number of rounds.
        clients: what is known about each client; None if a server will learn who takes part.
        guarantee: overall (epsilon, delta), if the run knows it.
        deployed: whether the clients are real sites.
    """
    if method.auto is not None:
        settings = {**settings, "server_rate": AUTO}
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
    )


class RunLoop:
    """The state of one run: begin or resume, save each round, finish.

    Args:
        before: see `result_before_training`.
        theta: [p] initial parameters; those of a checkpoint take precedence.
        files: the run's folder, which is resumed; None keeps everything in memory.

    Attributes:
        snapshot: the state that the next round starts from.
        records: of all rounds so far, in order.
        status: ``unfinished`` until the run has ended. A driver sets ``budgets_spent``.
        declarations: what sites of a deployed run declare, by client id.

    Raises:
        InvalidValueError: the folder belongs to another run.
    """

    def __init__(self, before: RunResult, theta: Tensor, files: RunFolder | None = None) -> None:
        self._before, self._files = before, files
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
                self.snapshot, self.records = snapshot, list(records)
                self._check_divergence()
                _log.info("%s: resuming after round %d", files.path, snapshot.round)
        self.declarations = load_declarations(files.path / _DECLARATIONS)
        if not self.ended:
            files.result_file.unlink(missing_ok=True)
        self._write_start(files)

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
        self._check_divergence()

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
            theta = None if self.status == "no_updates" else self.snapshot.released
            self._files.finish(result.summary(), theta)
        return result

    def result(self) -> RunResult:
        """What is known so far."""
        clients = self._sites() if self._before.deployed else self._before.clients
        records = tuple(self.records)
        return replace(self._before, status=self.status, rounds=records, clients=clients)

    def _sites(self) -> dict[str, ClientFacts]:
        """What a server knows about each site: no budget, at most what the site declares."""
        seen = {client for record in self.records for client in (*record.weights, *record.dropped)}
        declared = {client: asdict(claim) for client, claim in self.declarations.items()}
        return {
            client: ClientFacts(declared=declared.get(client))
            for client in sorted(seen | declared.keys())
        }
