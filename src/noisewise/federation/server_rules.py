"""`ServerRules`: how a server aggregates updates of sites that it does not trust.

`simulate` knows every client; a server knows only the updates that it receives. Both change the
model by the same `server_step` and keep the run by the same `RunLoop`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noisewise.aggregation.base import Disclosure, UpdateMatrix
from noisewise.aggregation.drop_reason import DropKind, DropReason
from noisewise.aggregation.methods import Method
from noisewise.aggregation.screening import Screened, stack_updates
from noisewise.checks import positive_int, positive_number
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.checkpoint import Snapshot
from noisewise.federation.server_step import ServerStep, server_step, unchanged

__all__ = ["Disclosed", "ServerRules"]

Disclosed = Mapping[Disclosure, Mapping[str, float]]
"""What an aggregator needs to know about the sites, by client id, as the operator entered it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerRules:
    """How a server aggregates the updates of sites. No update can end the run.

    Args:
        method: with its server steps, see `Method.with_server_steps`.
        disclosed: what the method's aggregator needs to know about the sites.
        min_clients: a round with fewer updates leaves the model as it was.

    Raises:
        InvalidValueError: the method shares no model, needs true variances, has no privacy, or
            needs something that is not disclosed, or a disclosed value is not positive.
    """

    method: Method
    disclosed: Disclosed
    min_clients: int

    def __post_init__(self) -> None:
        method, needs = self.method, self.method.aggregator.needs
        positive_int("min_clients", self.min_clients)
        for need, values in self.disclosed.items():
            for client, value in values.items():  # otherwise it would fail after sites have trained
                positive_number(f"disclosed {need.value} of client {client}", value)
        if not method.shares_model:
            raise InvalidValueError("method", method.name, "shares no model: for simulations only")
        if Disclosure.TRUE_VARIANCE in needs:
            raise InvalidValueError(
                "method", method.name, "needs the true noise of each update: for simulations only"
            )
        if not method.private:
            raise InvalidValueError("method", method.name, "has no privacy: for simulations only")
        for need in sorted(needs, key=lambda n: n.value):
            if need not in self.disclosed:
                allowed = f"must hold {need.value} by client id, which {method.name} needs"
                raise InvalidValueError(
                    "disclosed", sorted(n.value for n in self.disclosed), allowed
                )
            _log.warning(
                "%s requires that every site discloses its %s to the server, and cannot check it; "
                "RobustHDP and NoiseWise do not require it",
                method.name,
                need.value,
            )

    def aggregate(
        self, snapshot: Snapshot, updates: Mapping[str, Tensor], absent: Mapping[str, str]
    ) -> ServerStep:
        """Aggregate a round's updates and change the model.

        Args:
            snapshot: the state before the round.
            updates: [p] by client id; `update_fault` found no fault in any.
            absent: clients that were asked and sent no such update, and why.
        """
        undisclosed = self._undisclosed(updates)
        clients = [client for client in updates if client not in undisclosed]
        dropped = {**absent, **undisclosed}
        if len(clients) < self.min_clients:
            why = DropReason(
                f"{len(clients)} of at least {self.min_clients} updates: the model does not change",
                DropKind.TOO_FEW,
            )
            _log.error("round %d: %s", snapshot.round + 1, why)
            step = unchanged(snapshot, {**dict.fromkeys(clients, why), **dropped})
        else:
            screened = Screened(stack_updates(updates, clients), dropped)
            step = self._step(snapshot.counting(clients), screened)
        for client, reason in sorted(step.dropped.items()):
            _log.warning("round %d: client %s %s", step.snapshot.round, client, reason)
        return step

    def _step(self, snapshot: Snapshot, screened: Screened) -> ServerStep:
        try:
            return server_step(self.method, snapshot, screened, self._disclose)
        except NoisewiseError as error:  # such as too few updates for a guard: the run goes on
            _log.error("round %d: %s; the model does not change", snapshot.round + 1, error)
            reasons = dict.fromkeys(screened.updates.ids, DropReason.of(error))
            return unchanged(snapshot, {**reasons, **screened.dropped})
        except Exception as error:
            step = self._step_without_one(snapshot, screened, type(error).__name__[:60])
            if step is None:
                raise
            return step

    def _step_without_one(
        self, snapshot: Snapshot, screened: Screened, error: str
    ) -> ServerStep | None:
        """The step without one update on which the aggregator fails; None if it still fails.

        A user's aggregator or estimator may fail on an update that passes the screening. Its sender
        could otherwise end the run and every restart of it.
        """
        values, ids = screened.updates.values, screened.updates.ids
        if len(ids) <= self.min_clients:
            return None
        for left_out in ids:
            columns = [column for column, client in enumerate(ids) if client != left_out]
            others = UpdateMatrix(values[:, columns], tuple(ids[column] for column in columns))
            why = f"sent an update on which {self.method.name} fails ({error})"
            without = Screened(others, {**screened.dropped, left_out: why})
            try:
                return server_step(self.method, snapshot, without, self._disclose)
            except Exception:
                _log.debug("the aggregator also fails without %s", left_out, exc_info=True)
        return None

    def _undisclosed(self, clients: Iterable[str]) -> dict[str, str]:
        """Clients without a value that the aggregator needs, and which value."""
        return {
            client: f"has not disclosed its {need.value}"
            for need in self.method.aggregator.needs
            for client in clients
            if client not in self.disclosed[need]
        }

    def _disclose(self, ids: tuple[str, ...]) -> dict[Disclosure, NDArray[np.float64]]:
        return {
            need: np.array([self.disclosed[need][client] for client in ids], dtype=np.float64)
            for need in self.method.aggregator.needs
        }
