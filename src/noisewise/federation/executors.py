"""Executors: who computes what the clients of a round compute. Results do not depend on them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.clients import Client, to_tensors
from noisewise.federation.evaluation import Evaluator, Metric, Scores, accuracy
from noisewise.federation.settings import DEFAULT_LOSS_RECORDS
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training.engine import make_engine
from noisewise.training.gradients import GradientEngine, Loss
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH, TensorData, local_update, per_step

__all__ = [
    "Executor",
    "ExecutorName",
    "ProcessExecutor",
    "SerialExecutor",
    "Workload",
    "check_executor",
    "end_workers",
    "follow_parent",
    "longest_first",
    "make_executor",
    "one_thread",
    "until_done",
]

ExecutorName = Literal["serial", "processes", "ray"]
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)
_ATTEMPTS = 3


@dataclass(frozen=True)
class Workload:
    """What stays the same over all rounds of a run, as far as the clients are concerned."""

    model: nn.Module
    loss: Loss
    clients: tuple[Client, ...]
    plans: tuple[LocalPlan, ...]
    learning_rate: float
    seed: int
    physical_batch: int = DEFAULT_PHYSICAL_BATCH
    device: str = "cpu"
    metric: Metric = accuracy
    loss_records: int = DEFAULT_LOSS_RECORDS
    normalise: bool = False


class Executor(Protocol):
    """Computes the updates of some clients in one round, and scores of a global model."""

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """Updates [p] of the clients at positions ``members``, in that order."""
        ...

    def evaluate(self, theta: Tensor) -> list[Scores]:
        """Scores of ``theta`` at every client, in order."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and BLAS on one thread: sums have one order, and processes do not fight for cores.

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
    """One client after the other, in this process; the caller sets `one_thread`."""

    def __init__(self, workload: Workload) -> None:
        work = self._workload = workload
        self._data: dict[int, TensorData] = {}
        self._scored: dict[int, tuple[TensorData, TensorData]] = {}
        self._evaluator = Evaluator(
            work.model, work.loss, work.metric, work.loss_records, work.device
        )
        self._engine: GradientEngine | None = None

    def prepare(self) -> None:
        """Scale all clients' records now, so that processes forked later share the memory."""
        for member in range(len(self._workload.clients)):
            self._training_data(member)
            self._scoring_data(member)

    def _training_data(self, member: int) -> TensorData:
        if member not in self._data:
            train = self._workload.clients[member].data.train
            self._data[member] = to_tensors(train, self._workload.device)
        return self._data[member]

    def _scoring_data(self, member: int) -> tuple[TensorData, TensorData]:
        if member not in self._scored:
            data = self._workload.clients[member].data
            self._scored[member] = self._evaluator.prepare(data)
        return self._scored[member]

    def update(self, theta: Tensor, round_number: int, member: int) -> Tensor:
        """The update of one client."""
        work = self._workload
        if self._engine is None:
            work.model.train()
            self._engine = make_engine(work.model, work.loss, isolate=False)
        delta = local_update(
            work.model,
            theta,
            self._training_data(member),
            work.plans[member],
            work.learning_rate,
            work.loss,
            SeededRandom(work.seed, round_number, work.clients[member].spec.id),
            physical_batch=work.physical_batch,
            engine=self._engine,
        ).delta
        return per_step(delta, work.plans[member]) if work.normalise else delta

    def score(self, theta: Tensor, member: int) -> Scores:
        """The scores at one client."""
        return self._evaluator(theta, self._scoring_data(member))

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        return [self.update(theta, round_number, member) for member in members]

    def evaluate(self, theta: Tensor) -> list[Scores]:
        """See `Executor`."""
        return [self.score(theta, member) for member in range(len(self._workload.clients))]

    def close(self) -> None:
        """Nothing to end."""


def longest_first(workload: Workload, members: Sequence[int]) -> list[int]:
    """Long tasks first: with few workers, a long one at the end would leave the others idle."""
    return sorted(members, key=lambda member: -workload.plans[member].steps_per_round)


def until_done(
    attempt: Callable[[list[int]], list[int]],
    workload: Workload,
    members: Sequence[int],
    what: str,
) -> None:
    """Call ``attempt`` with the members that are left until it leaves none.

    A simulated client's randomness is keyed by (seed, round, client), so what is done again is
    the same update bit for bit: one release, charged once, by whoever counts the round.

    Args:
        attempt: computes members and returns those that a dying worker left undone.
        workload: for the clients' names.
        members: positions of clients.
        what: for the log, such as "round 3".

    Raises:
        NoisewiseError: workers died three times.
    """
    missing = list(members)
    for number in range(1, _ATTEMPTS + 1):
        missing = attempt(missing)
        if not missing:
            return
        names = ", ".join(workload.clients[member].spec.id for member in missing)
        _log.warning(
            "a worker died in %s (attempt %d of %d); doing %s again from the round's start",
            what,
            number,
            _ATTEMPTS,
            names,
        )
    raise NoisewiseError(
        f"workers died {_ATTEMPTS} times in {what}: out of memory? Use fewer workers or a smaller "
        "physical_batch; what is done so far can be resumed"
    )


def _shared(tensor: Tensor) -> Tensor:
    """The same tensor in memory that forked and spawned workers see too."""
    moved: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


_worker: tuple[SerialExecutor, Tensor, Tensor] | None = None


def follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent has gone.

    Ctrl-C reaches the whole group, but ending the work is the parent's affair. A parent that was
    killed cannot end anybody: its workers would go on and write beside those that resume the run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(target=_end_without, args=(parent.pid,), daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool at once, in the middle of its work: checkpoints hold what is done."""
    workers = list((pool._processes or {}).values())  # no public name before Python 3.14
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()


def _start_worker(executor: SerialExecutor, theta: Tensor, results: Tensor) -> None:
    global _worker
    follow_parent()
    torch.set_num_threads(1)
    threadpool_limits(1)
    _worker = executor, theta, results


def _work(round_number: int, member: int) -> int:
    """Compute one client's update in a worker, into shared memory."""
    assert _worker is not None
    executor, theta, results = _worker
    results[member] = executor.update(theta, round_number, member)
    return member


def _score(member: int) -> tuple[int, Scores]:
    """Score the shared parameters at one client in a worker."""
    assert _worker is not None
    executor, theta, _ = _worker
    return member, executor.score(theta, member)


class ProcessExecutor:
    """Clients spread over processes; parameters and updates travel through shared memory.

    Workers are forked where the system can, so that the scaled records are shared and not copied.
    A worker that dies is reported, and what it was doing is done again: see `until_done`.
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

        def attempt(some: list[int]) -> list[int]:
            done = self._attempt(
                lambda pool, member: pool.submit(_work, round_number, member), some
            )
            return [member for member in some if member not in set(done)]

        until_done(attempt, self._workload, members, f"round {round_number}")
        return [self._results[member].clone().to(theta.device) for member in members]

    def evaluate(self, theta: Tensor) -> list[Scores]:
        """See `Executor`."""
        self._theta.copy_(theta)
        scores: dict[int, Scores] = {}

        def attempt(some: list[int]) -> list[int]:
            scores.update(self._attempt(lambda pool, member: pool.submit(_score, member), some))
            return [member for member in some if member not in scores]

        everyone = range(len(self._workload.clients))
        until_done(attempt, self._workload, everyone, "an evaluation")
        return [scores[member] for member in everyone]

    def _attempt(
        self, submit: Callable[[ProcessPoolExecutor, int], Future[Answer]], members: list[int]
    ) -> list[Answer]:
        """The answers of those workers that lived."""
        answers: list[Answer] = []
        try:
            pool = self._start()
            futures = [submit(pool, member) for member in longest_first(self._workload, members)]
            for future in as_completed(futures):
                answers.append(future.result())
        except BrokenProcessPool:
            self.close()
        except KeyboardInterrupt:
            if self._pool is not None:
                end_workers(self._pool)
                self._pool = None
            raise
        return answers

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def make_executor(
    workload: Workload,
    workers: int,
    theta: Tensor,
    name: ExecutorName | None = None,
    ray_address: str | None = None,
) -> Executor:
    """The executor of a name; without one, serial for one worker and processes for more.

    Args:
        workload: what the clients need.
        workers: processes; of a Ray cluster that is started here, its processors.
        theta: [p] for size and type.
        name: which.
        ray_address: of a running Ray cluster; None starts one on this machine.

    Raises:
        InvalidValueError: names the field that is wrong.
        MissingExtraError: Ray is wanted and not installed.
    """
    positive_int("workers", workers)
    if name is None and ray_address is None:
        name = "serial" if workers == 1 or workload.device != "cpu" else "processes"
    check_executor(name, ray_address)
    if name == "serial":
        return SerialExecutor(workload)
    if workload.device != "cpu":
        allowed = f"works with processors only, not device = {workload.device!r}; choose serial"
        raise InvalidValueError("training.executor", name, allowed)
    if name == "processes":
        return ProcessExecutor(workload, workers, theta.numel(), theta.dtype)
    from noisewise.federation.ray_executor import RayExecutor

    return RayExecutor(workload, workers, ray_address)


def check_executor(name: str | None, ray_address: str | None) -> None:
    """Refuse names that there are not, and an address that nobody would use."""
    if name is not None and name not in get_args(ExecutorName):
        allowed = "must be one of " + ", ".join(get_args(ExecutorName))
        raise InvalidValueError("training.executor", name, allowed)
    if ray_address is not None and name != "ray":
        raise InvalidValueError(
            "training.ray_address", ray_address, 'needs training.executor = "ray"'
        )
    if ray_address is not None and not ray_address.strip():
        raise InvalidValueError(
            "training.ray_address", ray_address, 'must be like "10.0.0.5:6379" or "auto"'
        )
