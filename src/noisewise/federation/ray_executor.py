"""`RayExecutor`: the clients of a round as tasks of a Ray cluster, here or elsewhere.

A Ray cluster runs any code that is sent to it, and sends Python objects between its machines: use
only a cluster of your own in a network of your own. If all machines have the same kind of
processor, the results are bit-identical to those of the serial executor.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError, MissingExtraError, NoisewiseError
from noisewise.federation.clients import Client
from noisewise.federation.evaluation import Scores
from noisewise.federation.executors import SerialExecutor, Workload, longest_first, until_done
from noisewise.privacy.plan import LocalPlan

__all__ = ["RayExecutor"]


def _import_ray() -> Any:
    # No usage reports to Ray's developers unless the user turns them on.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # otherwise Ray warns at every start
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError(
            "training.executor = 'ray' needs Ray: pip install 'noisewise[ray]'"
        ) from error


_run: str = ""  # in a worker: the run of the last task
_clients: dict[str, SerialExecutor] = {}  # in a worker: an executor for each client of that run


def _executor(run: str, shared: Workload, client: Client, plan: LocalPlan) -> SerialExecutor:
    """The worker's executor for one client; it keeps the client's scaled records."""
    global _run
    if run != _run:
        torch.set_num_threads(1)
        threadpool_limits(1)
        _clients.clear()
        _run = run
    if client.spec.id not in _clients:
        _clients[client.spec.id] = SerialExecutor(replace(shared, clients=(client,), plans=(plan,)))
    return _clients[client.spec.id]


def _update(
    run: str, shared: Workload, client: Client, plan: LocalPlan, theta: Any, round_number: int
) -> Any:
    """The task that trains one client: its update as an array [p]."""
    executor = _executor(run, shared, client, plan)
    return executor.update(_tensor(theta), round_number, 0).numpy()


def _score(
    run: str, shared: Workload, client: Client, plan: LocalPlan, theta: Any, confusion: bool
) -> Scores:
    """The task that scores a global model at one client."""
    return _executor(run, shared, client, plan).score(_tensor(theta), 0, confusion)


def _tensor(array: Any) -> Tensor:
    """A tensor view of an array in the object store, which is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def _check_address(address: str) -> None:
    """Raise an `OSError` within seconds if nothing listens there; Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


class RayExecutor:
    """Spreads clients over the workers of a Ray cluster, each on one CPU and one thread.

    Records are put into the object store once, when the run starts. Ray never retries a task
    (``max_retries=0``): a deployed client would spend its budget twice. A worker that dies is
    logged, and its members are computed again: see `until_done`.

    Args:
        workload: what the clients need.
        workers: number of CPUs of a cluster that is started here.
        address: of a running cluster; None starts one here, which `close` ends.

    Raises:
        MissingExtraError: Ray is not installed.
        InvalidValueError: there is no cluster at the address.
    """

    def __init__(self, workload: Workload, workers: int, address: str | None = None) -> None:
        ray = self._ray = _import_ray()
        self._workload = workload
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            self._connect(positive_int("workers", workers), address)
        options = {"num_cpus": 1, "max_retries": 0}
        self._tasks = {task: ray.remote(**options)(task) for task in (_update, _score)}
        self._run = uuid.uuid4().hex
        self._shared = ray.put(replace(workload, clients=(), plans=()))
        self._clients = [ray.put(client) for client in workload.clients]

    def _connect(self, workers: int, address: str | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": "error"}
        if address is None:
            # "local" also if RAY_ADDRESS is set: that variable is not part of our config. With
            # this path, workers import the same modules as this process, also a user's own.
            path = os.pathsep.join(filter(None, sys.path))
            self._ray.init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                **quiet,
            )
            return
        try:
            _check_address(address)
            self._ray.init(address=address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InvalidValueError(
                "training.ray_address", address, f"must be a running Ray cluster ({reason})"
            ) from error

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        updates = self._all(_update, theta, members, f"round {round_number}", round_number)
        return [torch.from_numpy(update.copy()).to(theta.device) for update in updates]

    def evaluate(
        self, theta: Tensor, members: Sequence[int], confusion: bool = False
    ) -> list[Scores]:
        """See `Executor`."""
        return self._all(_score, theta, members, "an evaluation", confusion)

    def _all(
        self,
        task: Callable[..., Any],
        theta: Tensor,
        members: Sequence[int],
        phase: str,
        *more: int,
    ) -> list[Any]:
        """The answers of a task for all members, whichever workers die."""
        ray, plans = self._ray, self._workload.plans
        remote, parameters = self._tasks[task], ray.put(theta.cpu().numpy())
        errors = ray.exceptions
        deaths = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)

        def attempt(missing: list[int]) -> dict[int, Any]:
            references = {
                member: remote.remote(
                    self._run, self._shared, self._clients[member], plans[member], parameters, *more
                )
                for member in longest_first(self._workload, missing)
            }
            answers: dict[int, Any] = {}
            for member, reference in references.items():
                try:
                    answers[member] = ray.get(reference)
                except deaths:
                    continue
                except errors.RayTaskError as error:
                    if isinstance(error.cause, errors.RaySystemError):
                        raise NoisewiseError(
                            "a Ray worker cannot read its task; are noisewise and your own modules "
                            f"installed on the cluster? {str(error.cause).splitlines()[0]}"
                        ) from error
                    raise error.cause from error
            return answers

        return until_done(attempt, self._workload, members, phase)

    def close(self) -> None:
        """End the cluster that was started here, or disconnect from a running one."""
        self._clients, self._shared = [], None
        if self._connected_here:
            self._ray.shutdown()
