"""Executors: who computes the local updates of a round. Results do not depend on the choice."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from noisewise.checks import positive_int
from noisewise.errors import NoisewiseError
from noisewise.federation.clients import Client, to_tensors
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training.gradients import Loss
from noisewise.training.local import DEFAULT_PHYSICAL_BATCH, TensorData, local_update

__all__ = [
    "Executor",
    "ProcessExecutor",
    "SerialExecutor",
    "Workload",
    "make_executor",
    "one_thread",
]

_log = logging.getLogger(__name__)
_ATTEMPTS = 3


@dataclass(frozen=True)
class Workload:
    """What stays the same over all rounds of a run, as far as local training is concerned."""

    model: nn.Module
    loss: Loss
    clients: tuple[Client, ...]
    plans: tuple[LocalPlan, ...]
    learning_rate: float
    seed: int
    physical_batch: int = DEFAULT_PHYSICAL_BATCH
    device: str = "cpu"


class Executor(Protocol):
    """Computes the updates of some clients in one round."""

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """Updates [p] of the clients at positions ``members``, in that order."""
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
        self._workload = workload
        self._data: dict[int, TensorData] = {}

    def update(self, theta: Tensor, round_number: int, member: int) -> Tensor:
        """The update of one client."""
        work = self._workload
        if member not in self._data:
            self._data[member] = to_tensors(work.clients[member].data.train, work.device)
        work.model.train()
        return local_update(
            work.model,
            theta,
            self._data[member],
            work.plans[member],
            work.learning_rate,
            work.loss,
            SeededRandom(work.seed, round_number, work.clients[member].spec.id),
            physical_batch=work.physical_batch,
        ).delta

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        return [self.update(theta, round_number, member) for member in members]

    def close(self) -> None:
        """Nothing to end."""


def _shared(tensor: Tensor) -> Tensor:
    """The same tensor in memory that forked and spawned workers see too."""
    moved: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


_worker: tuple[SerialExecutor, Tensor, Tensor] | None = None


def _start_worker(workload: Workload, theta: Tensor, results: Tensor) -> None:
    global _worker
    torch.set_num_threads(1)
    threadpool_limits(1)
    _worker = SerialExecutor(workload), theta, results


def _work(round_number: int, member: int) -> int:
    """Compute one client's update in a worker, into shared memory."""
    assert _worker is not None
    executor, theta, results = _worker
    results[member] = executor.update(theta, round_number, member)
    return member


class ProcessExecutor:
    """Clients spread over processes; parameters and updates travel through shared memory.

    Workers are forked where the system can, so that the data are shared and not copied. A worker
    that dies is reported, and what it was doing is done again from the round's start: a simulated
    client's randomness is keyed, so the repetition is the same update, not a second release.
    """

    def __init__(self, workload: Workload, workers: int, size: int, dtype: torch.dtype) -> None:
        self._workers = positive_int("workers", workers)
        methods = torch.multiprocessing.get_all_start_methods()
        self._context = torch.multiprocessing.get_context("fork" if "fork" in methods else "spawn")
        self._theta = _shared(torch.zeros(size, dtype=dtype))
        self._results = _shared(torch.zeros(len(workload.clients), size, dtype=dtype))
        self._workload = workload
        self._pool: ProcessPoolExecutor | None = None

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=self._context,
                initializer=_start_worker,
                initargs=(self._workload, self._theta, self._results),
            )
        return self._pool

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        self._theta.copy_(theta)
        missing = list(members)
        for attempt in range(_ATTEMPTS):
            missing = self._attempt(round_number, missing)
            if not missing:
                return [self._results[member].clone().to(theta.device) for member in members]
            names = ", ".join(self._workload.clients[member].spec.id for member in missing)
            _log.warning(
                "a worker died in round %d (attempt %d of %d); doing %s again from the round's "
                "start",
                round_number,
                attempt + 1,
                _ATTEMPTS,
                names,
            )
        raise NoisewiseError(
            f"workers died {_ATTEMPTS} times in round {round_number}: out of memory? Use fewer "
            "workers or a smaller physical_batch; what is done so far can be resumed"
        )

    def _attempt(self, round_number: int, members: list[int]) -> list[int]:
        """Try to compute ``members``; return those that a dying worker left undone."""
        pool = self._start()
        # Long tasks first: with few workers, a long one at the end would leave the others idle.
        plans = self._workload.plans
        order = sorted(members, key=lambda member: -plans[member].steps_per_round)
        done: set[int] = set()
        try:
            futures = [pool.submit(_work, round_number, member) for member in order]
            for future in as_completed(futures):
                done.add(future.result())
        except BrokenProcessPool:
            self.close()
        return [member for member in members if member not in done]

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def make_executor(workload: Workload, workers: int, theta: Tensor) -> Executor:
    """Serial for one worker, processes for more."""
    positive_int("workers", workers)
    if workers == 1:
        return SerialExecutor(workload)
    return ProcessExecutor(workload, workers, theta.numel(), theta.dtype)
