"""`LockStep`: several simulations of one seed side by side, their clients trained together.

A study compares many methods and learning rates under the same seed, and each client then draws the
same samples and the same normals in all of them. For softmax regression, whose steps cost little
more than drawing them, ten runs in lock step take about as long as two.

    in_lock_step([lambda make: simulate(..., executor=make), ...])
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from noisewise.data.datasets import Examples
from noisewise.federation.evaluation import Scores
from noisewise.federation.executors import SerialExecutor, Workload
from noisewise.federation.identity import add_records
from noisewise.randomness import SeededRandom
from noisewise.training.engine.linear import is_linear
from noisewise.training.local import TensorData, per_step
from noisewise.training.paired import FlatRecords, paired_key, paired_linear_updates

__all__ = ["LockStep", "MakeExecutor", "Seat", "in_lock_step"]

Result = TypeVar("Result")


@dataclass
class _Request:
    """What one run asks for in a round, and what it gets."""

    executor: _SeatedExecutor
    theta: Tensor
    round_number: int
    members: Sequence[int]
    updates: list[Tensor] | None = None
    error: Exception | None = None


class LockStep:
    """The table at which runs wait for each other; each takes a seat before any of them starts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seated = 0
        self._waiting: list[_Request] = []
        self._data: dict[str, tuple[TensorData, FlatRecords]] = {}
        self._scored: dict[tuple[str, str], tuple[TensorData, TensorData]] = {}

    def join(self) -> Seat:
        """A seat for one run. Runs compute when everyone who is seated waits."""
        with self._changed:
            self._seated += 1
        return Seat(self)

    def _leave(self) -> None:
        with self._changed:
            self._seated -= 1
            self._serve()

    def _updates(self, request: _Request) -> list[Tensor]:
        with self._changed:
            self._waiting.append(request)
            self._serve()
            while request.updates is None and request.error is None:
                self._changed.wait()
        if request.error is not None:
            raise request.error
        assert request.updates is not None
        return request.updates

    def _serve(self) -> None:
        """Compute for everyone once nobody is missing; the lock is held."""
        if not self._waiting or len(self._waiting) < self._seated:
            return
        requests, self._waiting = self._waiting, []
        try:
            _compute(requests)
        except Exception as error:
            for request in requests:
                request.error = error
        self._changed.notify_all()


class Seat:
    """One run's place; leaving it lets the others go on."""

    def __init__(self, table: LockStep) -> None:
        self._table, self._taken = table, True

    def executor(self, workload: Workload) -> SerialExecutor:
        """For `simulate(executor=...)`."""
        return _SeatedExecutor(workload, self._table)

    def leave(self) -> None:
        """Get up, whether the run ended well or not; a second time does nothing."""
        if self._taken:
            self._taken = False
            self._table._leave()

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *details: object) -> None:
        self.leave()


MakeExecutor = Callable[[Workload], SerialExecutor]


def in_lock_step(plays: Sequence[Callable[[MakeExecutor], Result]]) -> list[Result]:
    """Call each with the executor that its run must use, all side by side.

    Returns:
        The results, in order. If some fail, the others go on to their end, and the first error is
        raised then.
    """
    table = LockStep()
    seats = [table.join() for _ in plays]

    def play(number: int) -> Result:
        with seats[number] as seat:
            return plays[number](seat.executor)

    if not plays:
        return []
    with ThreadPoolExecutor(len(plays)) as pool:
        futures = [pool.submit(play, number) for number in range(len(plays))]
    return [future.result() for future in futures]


class _SeatedExecutor(SerialExecutor):
    """Trains with the others at the table; scaled records are the table's, not each run's."""

    def __init__(self, workload: Workload, table: LockStep) -> None:
        super().__init__(workload)
        self._table = table
        self.fits = is_linear(workload.model, workload.loss) and workload.device == "cpu"
        self.digests = [
            (_digest(client.data.train), _digest(client.data.test)) for client in workload.clients
        ]

    @property
    def workload(self) -> Workload:
        """What the run's clients need."""
        return self._workload

    def _training_data(self, member: int) -> TensorData:
        return self._records(member)[0]

    def flat_records(self, member: int) -> FlatRecords:
        """A client's records, for training with others."""
        return self._records(member)[1]

    def _records(self, member: int) -> tuple[TensorData, FlatRecords]:
        known, digest = self._table._data, self.digests[member][0]
        if digest not in known:
            data = super()._training_data(member)
            known[digest] = data, FlatRecords.of(data)
        return known[digest]

    def _scoring_data(self, member: int) -> tuple[TensorData, TensorData]:
        known, digests = self._table._scored, self.digests[member]
        if digests not in known:
            known[digests] = super()._scoring_data(member)
        return known[digests]

    def alone(self, theta: Tensor, round_number: int, member: int) -> Tensor:
        """The update of one client, without the others."""
        return super().update(theta, round_number, member)

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        return self._table._updates(_Request(self, theta, round_number, members))

    def evaluate(self, theta: Tensor) -> list[Scores]:
        """See `Executor`; one run at a time, since they share the records."""
        with self._table._changed:
            return super().evaluate(theta)


def _digest(examples: Examples) -> str:
    """Equal for equal records."""
    digest = hashlib.sha256(repr(examples.inputs.shape).encode())
    add_records(digest, examples)
    return digest.hexdigest()


def _compute(requests: list[_Request]) -> None:
    """Updates for all requests: tasks that share records and randomness in one go."""
    found: dict[tuple[int, int], Tensor] = {}
    groups: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for number, request in enumerate(requests):
        work = request.executor.workload
        for member in request.members:
            if not request.executor.fits:
                theta = request.theta
                found[number, member] = request.executor.alone(theta, request.round_number, member)
                continue
            key = (
                work.seed,
                request.round_number,
                work.clients[member].spec.id,
                request.executor.digests[member][0],
                paired_key(work.plans[member]),
                request.theta.shape,
            )
            groups[key].append((number, member))
    for tasks in groups.values():
        for task, update in zip(tasks, _group(requests, tasks), strict=True):
            found[task] = update
    for number, request in enumerate(requests):
        request.updates = [found[number, member] for member in request.members]


def _group(requests: list[_Request], tasks: list[tuple[int, int]]) -> list[Tensor]:
    number, member = tasks[0]
    first = requests[number]
    works = [requests[run].executor.workload for run, _ in tasks]
    plans = [work.plans[position] for work, (_, position) in zip(works, tasks, strict=True)]
    updates = paired_linear_updates(
        [requests[run].theta for run, _ in tasks],
        int(list(first.executor.workload.model.parameters())[-1].numel()),
        first.executor.flat_records(member),
        plans,
        [work.learning_rate for work in works],
        SeededRandom(works[0].seed, first.round_number, works[0].clients[member].spec.id),
    )
    return [
        per_step(update, plan) if work.normalise else update
        for update, work, plan in zip(updates, works, plans, strict=True)
    ]
