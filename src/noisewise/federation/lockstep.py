"""`in_lock_step`: several simulations with one seed side by side, whose clients train together.

A study compares many methods and learning rates under the same seed. Each client then draws the
same samples and the same normals in all runs. A step of a head (see `training.heads`) takes little
more time than these draws, so ten runs in lock step take about as long as two. Models other than
heads are computed one run after the other.

    in_lock_step([lambda make: simulate(prepared, execution=Execution(executor=make)), ...])
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from noisewise.checks import positive_int
from noisewise.data.datasets import Examples
from noisewise.federation.evaluation import Scores
from noisewise.federation.executors import SerialExecutor, Workload
from noisewise.federation.fingerprint import add_records
from noisewise.randomness import SeededRandom
from noisewise.training.heads import HeadRecords, head_outputs, head_updates, paired_key
from noisewise.training.local import TensorData, per_step

__all__ = ["MakeExecutor", "in_lock_step"]

Result = TypeVar("Result")
Answer = TypeVar("Answer")
MakeExecutor = Callable[[Workload], SerialExecutor]
"""(workload) -> the executor that a run in lock step must use."""
Task = tuple[int, int]
"""(position of a request, position of a client)"""


def in_lock_step(
    runs: Sequence[Callable[[MakeExecutor], Result]], *, workers: int = 1
) -> list[Result]:
    """Call several functions side by side, each with the executor that its run must use.

    Runs that share their clients' records need the memory of one: prepare them with the same
    ``setup`` (see `noisewise.experiments.prepare.prepare`).

    Args:
        runs: each trains one run, for example with `simulate`.
        workers: number of threads that clients are spread over. The results do not depend on it.

    Returns:
        The results, in order. If a run fails, the others continue to their end; then the first
        error is raised.

    Raises:
        InvalidValueError: ``workers`` is not a positive integer.
    """
    positive_int("workers", workers)
    if not runs:
        return []
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        barrier = _Barrier(len(runs), threads)

        def train(number: int, run: Callable[[MakeExecutor], Result]) -> Result:
            try:
                return run(lambda workload: _BarrierExecutor(workload, barrier, number))
            finally:
                barrier.leave()

        with ThreadPoolExecutor(len(runs)) as pool:
            futures = [pool.submit(train, number, run) for number, run in enumerate(runs)]
    return [future.result() for future in futures]


@dataclass(eq=False)
class _Request:
    """What one run needs; ``answer`` or ``error`` is the reply.

    The answer is a list with one tensor for each member: its update [p] in a round, or the outputs
    [n, k] of ``theta`` for its held-out and then its training records if there is no round number.
    """

    executor: _BarrierExecutor
    theta: Tensor
    round_number: int | None
    members: Sequence[int]
    answer: list[Tensor] | None = None
    error: Exception | None = None


class _Barrier:
    """Where runs wait for each other: requests are computed once all runs wait.

    Args:
        n_runs: number of runs; a run that ends must call `leave`.
        threads: compute the clients.

    Attributes:
        changed: the condition whose lock guards all other attributes.
        training_data: scaled training records, which all runs share.
        head_records: the same for the closed form of heads.
        scoring_data: scaled records of evaluations, which all runs share.
    """

    def __init__(self, n_runs: int, threads: ThreadPoolExecutor) -> None:
        self.changed = threading.Condition()
        self.training_data: dict[str, TensorData] = {}
        self.head_records: dict[object, HeadRecords | None] = {}
        self.scoring_data: dict[object, tuple[TensorData, TensorData]] = {}
        self._digests: dict[int, tuple[Examples, str]] = {}
        self._n_runs = n_runs
        self._threads = threads
        self._waiting: list[_Request] = []

    def digest(self, examples: Examples) -> str:
        """A hash that is equal for equal records; computed once for each object."""
        with self.changed:
            if id(examples) not in self._digests:
                digest = hashlib.sha256(repr(examples.input_shape).encode())
                add_records(digest, examples)
                # The object is kept: otherwise another one could get its id.
                self._digests[id(examples)] = examples, digest.hexdigest()
            return self._digests[id(examples)][1]

    def leave(self) -> None:
        """Let the other runs continue without this one, whether or not it succeeded."""
        with self.changed:
            self._n_runs -= 1
            self._compute_if_all_wait()

    def ask(self, request: _Request) -> list[Tensor]:
        """Wait until all runs have a request; returns the answer to this one."""
        with self.changed:
            self._waiting.append(request)
            self._compute_if_all_wait()
            while request.answer is None and request.error is None:
                self.changed.wait()
        if request.error is not None:
            raise request.error
        assert request.answer is not None
        return request.answer

    def _compute_if_all_wait(self) -> None:
        """Compute requests once every run has one; the caller holds the lock.

        Evaluations come first: a run that evaluates would otherwise fall a round behind.
        """
        if not self._waiting or len(self._waiting) < self._n_runs:
            return
        evaluations = [request for request in self._waiting if request.round_number is None]
        # In the order of the runs, not of their arrival: a product rounds a run by its position.
        requests = sorted(evaluations or self._waiting, key=lambda request: request.executor.number)
        self._waiting = [request for request in self._waiting if request not in requests]
        try:
            _answer(requests, self._threads)
        except Exception as error:
            for request in requests:
                request.error = error
        self.changed.notify_all()


class _BarrierExecutor(SerialExecutor):
    """Trains its clients together with those of the other runs at the barrier.

    Args:
        workload: what the run's clients need.
        barrier: of all runs.
        number: position of the run.
    """

    def __init__(self, workload: Workload, barrier: _Barrier, number: int) -> None:
        super().__init__(workload)
        self._barrier, self.number = barrier, number
        self.digests = [
            (barrier.digest(client.data.train), barrier.digest(client.data.test))
            for client in workload.clients
        ]

    @property
    def workload(self) -> Workload:
        """What the run's clients need."""
        return self._workload

    def _training_data(self, member: int) -> TensorData:
        cache, digest = self._barrier.training_data, self.digests[member][0]
        if digest not in cache:
            cache[digest] = super()._training_data(member)
        return cache[digest]

    def head_records(self, member: int) -> HeadRecords | None:
        """See `SerialExecutor`; runs with equal records share them."""
        cache, key = self._barrier.head_records, (self.head, self.digests[member][0])
        if key not in cache:
            cache[key] = super().head_records(member)
        return cache[key]

    def scoring_data(self, member: int) -> tuple[TensorData, TensorData]:
        """See `SerialExecutor`; runs with equal records share them."""
        key = self.digests[member], self._workload.loss_records
        cache = self._barrier.scoring_data
        if key not in cache:
            cache[key] = super().scoring_data(member)
        return cache[key]

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        return self._barrier.ask(_Request(self, theta, round_number, members))

    def evaluate(
        self, theta: Tensor, members: Sequence[int], confusion: bool = False
    ) -> list[Scores]:
        """See `Executor`; the runs' outputs are computed together if they are those of heads."""
        with self._barrier.changed:  # one run at a time, because runs share records
            if self.head is None or any(self.head_records(m) is None for m in members):
                return super().evaluate(theta, members, confusion)
        outputs = self._barrier.ask(_Request(self, theta, None, members))
        return [
            self._evaluator.of_outputs(both, self.scoring_data(member), confusion)
            for member, both in zip(members, outputs, strict=True)
        ]


def _answer(requests: list[_Request], threads: ThreadPoolExecutor) -> None:
    """Compute all requests; tasks with equal records and randomness together."""
    answers: dict[Task, Tensor] = {}
    groups: dict[object, list[Task]] = defaultdict(list)
    for number, request in enumerate(requests):
        for member in request.members:
            if request.executor.head_records(member) is None:
                assert request.round_number is not None
                update = request.executor.update(request.theta, request.round_number, member)
                answers[number, member] = update
            else:
                groups[_group(request, member)].append((number, member))
    compute = _outputs_together if requests[0].round_number is None else _train_together
    tasks = list(groups.values())
    computed = threads.map(lambda group: compute(requests, group), tasks)
    for group, tensors in zip(tasks, computed, strict=True):
        answers.update(zip(group, tensors, strict=True))
    for number, request in enumerate(requests):
        request.answer = [answers[number, member] for member in request.members]


def _group(request: _Request, member: int) -> object:
    """Tasks with equal values are computed together."""
    executor, work = request.executor, request.executor.workload
    if request.round_number is None:
        return executor.head, executor.digests[member], work.loss_records
    client, plan = work.clients[member], work.plans[member]
    randomness = work.seed, request.round_number, client.spec.id
    return executor.head, randomness, executor.digests[member][0], paired_key(plan)


def _train_together(requests: list[_Request], tasks: list[Task]) -> list[Tensor]:
    """The updates of tasks that share records and randomness."""
    number, member = tasks[0]
    executor, round_number = requests[number].executor, requests[number].round_number
    head, records = executor.head, executor.head_records(member)
    assert head is not None
    assert records is not None
    assert round_number is not None
    works = [requests[run].executor.workload for run, _ in tasks]
    plans = [work.plans[position] for work, (_, position) in zip(works, tasks, strict=True)]
    updates = head_updates(
        head,
        [requests[run].theta for run, _ in tasks],
        records,
        plans,
        [work.rate(round_number) for work in works],
        SeededRandom(works[0].seed, round_number, works[0].clients[member].spec.id),
    )
    return [
        per_step(update, plan) if work.normalise else update
        for update, work, plan in zip(updates, works, plans, strict=True)
    ]


def _outputs_together(requests: list[_Request], tasks: list[Task]) -> list[Tensor]:
    """The outputs of tasks that share records: for the held-out records, then for the others."""
    number, member = tasks[0]
    executor = requests[number].executor
    assert executor.head is not None
    thetas = [requests[run].theta for run, _ in tasks]
    test, train = executor.scoring_data(member)
    outputs = [head_outputs(executor.head, thetas, data.tensor) for data in (test, train)]
    return list(torch.cat(outputs, 1))
