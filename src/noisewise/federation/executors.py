"""Executors compute the clients' part of a round. Results do not depend on the executor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from noisewise.aggregation.schedules import Schedule
from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.clients import Client, to_tensors
from noisewise.federation.evaluation import Evaluator, Scores
from noisewise.federation.settings import DEFAULT_LOSS_RECORDS
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training.engine import make_engine
from noisewise.training.gradients import GradientEngine, Loss
from noisewise.training.heads import HeadRecords, head_of, head_updates
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH, TensorData, local_update, per_step
from noisewise.training.local_optimisers import SGD, LocalOptimiser
from noisewise.training.metrics import Metric
from noisewise.training.tasks import CLASSIFICATION
from noisewise.worker_processes import end_workers, follow_parent

__all__ = [
    "Execution",
    "Executor",
    "ExecutorFactory",
    "ExecutorName",
    "ProcessExecutor",
    "SerialExecutor",
    "Workload",
    "check_executor",
    "longest_first",
    "one_thread",
    "until_done",
]

ExecutorName = Literal["serial", "processes", "ray"]
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)
_ATTEMPTS = 3


@dataclass(frozen=True)
class Workload:
    """What the clients need in every round of a run; see `Prepared` and `TrainingSettings`."""

    model: nn.Module
    loss: Loss
    clients: tuple[Client, ...]
    plans: tuple[LocalPlan, ...]
    learning_rate: float
    seed: int
    physical_batch: int = DEFAULT_PHYSICAL_BATCH
    device: str = "cpu"
    metrics: tuple[Metric, ...] = CLASSIFICATION.metrics
    loss_records: int = DEFAULT_LOSS_RECORDS
    normalise: bool = False
    schedule: Schedule | None = None
    optimiser: LocalOptimiser = SGD

    def rate(self, round_number: int) -> float:
        """The learning rate of a round."""
        factor = 1.0 if self.schedule is None else self.schedule.factor(round_number)
        return self.learning_rate * factor


class Executor(Protocol):
    """Computes the updates of clients in one round, and scores of a global model."""

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """Updates [p] of the clients at positions ``members``, in that order."""
        ...

    def evaluate(
        self, theta: Tensor, members: Sequence[int], confusion: bool = False
    ) -> list[Scores]:
        """Scores of ``theta`` at the clients at positions ``members``; see `Evaluator`."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and BLAS on one thread: sums have one order, processes do not compete for cores.

    On a busy machine, a second BLAS thread made a 16 x 16 eigenproblem a hundred times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


class SerialExecutor:
    """Computes one client after the other in this process; the caller uses `one_thread`."""

    def __init__(self, workload: Workload) -> None:
        work = self._workload = workload
        self._data: dict[int, TensorData] = {}
        self._scored: dict[int, tuple[TensorData, TensorData]] = {}
        self._evaluator = Evaluator(
            work.model, work.loss, work.metrics, work.loss_records, work.device
        )
        self._engine: GradientEngine | None = None
        closed_form = work.device == "cpu" and work.optimiser.is_sgd
        self.head = head_of(work.model, work.loss) if closed_form else None
        self._head_records: dict[int, HeadRecords | None] = {}

    def prepare(self) -> None:
        """Scale all clients' records now, so that processes that are forked later share them."""
        for member in range(len(self._workload.clients)):
            self._training_data(member)
            self.scoring_data(member)
            self.head_records(member)

    def _training_data(self, member: int) -> TensorData:
        if member not in self._data:
            train = self._workload.clients[member].data.train
            self._data[member] = to_tensors(train, self._workload.device)
        return self._data[member]

    def scoring_data(self, member: int) -> tuple[TensorData, TensorData]:
        """A client's held-out records and the training records that its loss is computed from."""
        if member not in self._scored:
            data = self._workload.clients[member].data
            self._scored[member] = self._evaluator.prepare(data)
        return self._scored[member]

    def head_records(self, member: int) -> HeadRecords | None:
        """A client's records for the closed form of heads; None if it does not cover them."""
        if self.head is None:
            return None
        if member not in self._head_records:
            records = HeadRecords.of(self.head, self._training_data(member))
            self._head_records[member] = records
        return self._head_records[member]

    def update(self, theta: Tensor, round_number: int, member: int) -> Tensor:
        """The update [p] of one client."""
        plan = self._workload.plans[member]
        delta = self._update(theta, round_number, member)
        return per_step(delta, plan) if self._workload.normalise else delta

    def _update(self, theta: Tensor, round_number: int, member: int) -> Tensor:
        work = self._workload
        plan, rate = work.plans[member], work.rate(round_number)
        rng = SeededRandom(work.seed, round_number, work.clients[member].spec.id)
        records = self.head_records(member)
        if self.head is not None and records is not None:
            return head_updates(self.head, [theta], records, [plan], [rate], rng)[0]
        if self._engine is None:
            work.model.train()
            self._engine = make_engine(work.model, work.loss, isolate=False)
        return local_update(
            work.model,
            theta,
            self._training_data(member),
            plan,
            rate,
            work.loss,
            rng,
            physical_batch=work.physical_batch,
            engine=self._engine,
            optimiser=work.optimiser,
        ).delta

    def score(self, theta: Tensor, member: int, confusion: bool = False) -> Scores:
        """The scores of ``theta`` at one client."""
        return self._evaluator(theta, self.scoring_data(member), confusion)

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        return [self.update(theta, round_number, member) for member in members]

    def evaluate(
        self, theta: Tensor, members: Sequence[int], confusion: bool = False
    ) -> list[Scores]:
        """See `Executor`."""
        with self._evaluator.holding(theta):
            return [self._evaluator.scores(self.scoring_data(m), confusion) for m in members]

    def close(self) -> None:
        """Nothing to end."""


def longest_first(workload: Workload, members: Sequence[int]) -> list[int]:
    """Order members by their number of steps: a long task at the end would leave workers idle."""
    return sorted(members, key=lambda member: -workload.plans[member].steps_per_round)


def until_done(
    attempt: Callable[[list[int]], Mapping[int, Answer]],
    workload: Workload,
    members: Sequence[int],
    phase: str,
) -> list[Answer]:
    """Call ``attempt`` with the members that are left until all have an answer.

    A simulated client's randomness is keyed by (seed, round, client). A repeated computation gives
    the same update bit for bit: one release, which is charged once.

    Args:
        attempt: computes members; those of a worker that died have no answer.
        workload: for the clients' names.
        members: positions of clients.
        phase: for the log, such as "round 3".

    Returns:
        The answers, in the order of the members.

    Raises:
        NoisewiseError: workers died three times.
    """
    answers: dict[int, Answer] = {}
    for number in range(1, _ATTEMPTS + 1):
        answers.update(attempt([member for member in members if member not in answers]))
        missing = [workload.clients[m].spec.id for m in members if m not in answers]
        if not missing:
            return [answers[member] for member in members]
        _log.warning(
            "a worker died in %s (attempt %d of %d); computing %s again from the round's start",
            phase,
            number,
            _ATTEMPTS,
            ", ".join(missing),
        )
    raise NoisewiseError(
        f"workers died {_ATTEMPTS} times in {phase}, probably for lack of memory. Use fewer "
        "workers or a smaller physical_batch, and run the same command again to resume"
    )


def _shared(tensor: Tensor) -> Tensor:
    """The same tensor in memory that is shared with worker processes."""
    moved: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


_worker: tuple[SerialExecutor, Tensor, Tensor] | None = None


def _start_worker(executor: SerialExecutor, theta: Tensor, results: Tensor) -> None:
    global _worker
    follow_parent()
    torch.set_num_threads(1)
    threadpool_limits(1)
    _worker = executor, theta, results


def _work(member: int, round_number: int) -> None:
    """Compute one client's update in a worker, into shared memory."""
    assert _worker is not None
    executor, theta, results = _worker
    results[member] = executor.update(theta, round_number, member)


def _score(member: int, confusion: bool) -> Scores:
    """Score the shared parameters at one client in a worker."""
    assert _worker is not None
    executor, theta, _ = _worker
    return executor.score(theta, member, confusion)


class ProcessExecutor:
    """Spreads clients over processes; parameters and updates are in shared memory.

    Workers are forked if the system can, so that scaled records are shared and not copied. A worker
    that dies is logged, and its members are computed again: see `until_done`.
    """

    def __init__(self, workload: Workload, workers: int, size: int, dtype: torch.dtype) -> None:
        self._workers = positive_int("workers", workers)
        methods = torch.multiprocessing.get_all_start_methods()
        self._context = torch.multiprocessing.get_context("fork" if "fork" in methods else "spawn")
        self._theta = _shared(torch.zeros(size, dtype=dtype))
        self._results = _shared(torch.zeros(len(workload.clients), size, dtype=dtype))
        self._workload = workload
        self._executor = SerialExecutor(workload)
        self._pool: ProcessPoolExecutor | None = None

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._executor.prepare()
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=self._context,
                initializer=_start_worker,
                initargs=(self._executor, self._theta, self._results),
            )
        return self._pool

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        self._theta.copy_(theta)
        self._all(_work, members, f"round {round_number}", round_number)
        return [self._results[member].clone().to(theta.device) for member in members]

    def evaluate(
        self, theta: Tensor, members: Sequence[int], confusion: bool = False
    ) -> list[Scores]:
        """See `Executor`."""
        self._theta.copy_(theta)
        return self._all(_score, members, "an evaluation", confusion)

    def _all(
        self, task: Callable[..., Answer], members: Sequence[int], phase: str, *arguments: int
    ) -> list[Answer]:
        """The answers of ``task(member, *arguments)`` for all members, whichever workers die."""

        def attempt(missing: list[int]) -> dict[int, Answer]:
            answers: dict[int, Answer] = {}
            try:
                pool, order = self._start(), longest_first(self._workload, missing)
                futures = {pool.submit(task, member, *arguments): member for member in order}
                for future in as_completed(futures):
                    answers[futures[future]] = future.result()
            except BrokenProcessPool:
                self.close()
            except KeyboardInterrupt:
                if self._pool is not None:
                    end_workers(self._pool)
                    self._pool = None
                raise
            return answers

        return until_done(attempt, self._workload, members, phase)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


ExecutorFactory = Callable[[Workload], Executor]
"""(workload) -> executor; `in_lock_step` passes one to each of its runs."""


@dataclass(frozen=True)
class Execution:
    """Which processes compute the clients' part of a run. No result depends on it.

    Attributes:
        workers: number of processes; for a Ray cluster that is started here, its number of CPUs.
        executor: "serial", "processes" or "ray", or a function that makes an executor. The default
            is serial for one worker and processes for more.
        ray_address: of a running Ray cluster; None starts one on this machine for the time of the
            run.

    Raises:
        InvalidValueError: names the invalid field.

    Example:
        >>> Execution(workers=4)
        Execution(workers=4, executor=None, ray_address=None)
    """

    workers: int = 1
    executor: ExecutorName | ExecutorFactory | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        positive_int("workers", self.workers)
        if not callable(self.executor):
            check_executor(self.executor, self.ray_address)

    def start(self, workload: Workload, theta: Tensor) -> Executor:
        """Make the executor.

        Args:
            workload: what the clients need.
            theta: [p] parameters; their number and type are used.

        Raises:
            InvalidValueError: the executor does not support the workload's device.
            MissingExtraError: Ray is not installed.
        """
        if callable(self.executor):
            return self.executor(workload)
        name, workers = self.executor, min(self.workers, len(workload.clients))
        if name is None:
            name = "serial" if workers == 1 or workload.device != "cpu" else "processes"
        if name == "serial":
            return SerialExecutor(workload)
        if workload.device != "cpu":
            allowed = f"supports CPUs only, not device = {workload.device!r}; choose serial"
            raise InvalidValueError("training.executor", name, allowed)
        if name == "processes":
            return ProcessExecutor(workload, workers, theta.numel(), theta.dtype)
        from noisewise.federation.ray_executor import RayExecutor

        return RayExecutor(workload, workers, self.ray_address)


def check_executor(name: str | None, ray_address: str | None) -> None:
    """Check an executor's name, and that an address belongs to Ray.

    Raises:
        InvalidValueError: the name is unknown, or the address is empty or belongs to no executor.
    """
    if name is not None and name not in get_args(ExecutorName):
        allowed = "must be one of " + ", ".join(get_args(ExecutorName))
        raise InvalidValueError("training.executor", name, allowed)
    if ray_address is not None and name != "ray":
        raise InvalidValueError(
            "training.ray_address", ray_address, 'requires training.executor = "ray"'
        )
    if ray_address is not None and not ray_address.strip():
        raise InvalidValueError(
            "training.ray_address",
            ray_address,
            'must be "auto" or an address such as "10.0.0.5:6379"',
        )
