"""`RayExecutor`: the clients of a round as tasks of a Ray cluster, here or elsewhere.

A Ray cluster runs whatever code it is sent and sends Python objects between its own machines: use
one of your own, behind your own walls. Machines of one kind give results that are bit-identical to
the serial ones.
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
    # A tool for privacy does not report its use to anyone unless asked to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns at every start
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError(
            "training.executor = 'ray' needs Ray: pip install 'noisewise[ray]'"
        ) from error


_run: str = ""  # in a worker: the run that it works for
_clients: dict[str, SerialExecutor] = {}  # in a worker: an executor for each client it has met


def _executor(run: str, shared: Workload, client: Client, plan: LocalPlan) -> SerialExecutor:
    """The worker's executor for one client, which keeps the client's scaled records."""
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


def _score(run: str, shared: Workload, client: Client, plan: LocalPlan, theta: Any) -> Scores:
    """The task that scores a global model at one client."""
    return _executor(run, shared, client, plan).score(_tensor(theta), 0)


def _tensor(array: Any) -> Tensor:
    """A view of an array of the object store, which nobody may write to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def _knock(address: str) -> None:
    """Fail within seconds where nobody listens; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


class RayExecutor:
    """Clients spread over the workers of a Ray cluster, each on one processor and one thread.

    Records are put into the object store once, when the run starts. No task is ever retried by
    Ray (``max_retries=0``): a deployed client would spend its budget twice. A worker that dies is
    reported, and what it was doing is done again by us: see `until_done`.

    Args:
        workload: what the clients need.
        workers: processors of a cluster that is started here.
        address: of a running cluster; None starts one here, which `close` ends.

    Raises:
        MissingExtraError: Ray is not installed.
        InvalidValueError: nobody answers at the address.
    """

    def __init__(self, workload: Workload, workers: int, address: str | None = None) -> None:
        ray = self._ray = _import_ray()
        self._workload = workload
        self._ours = not ray.is_initialized()
        if self._ours:
            self._connect(positive_int("workers", workers), address)
        options = {"num_cpus": 1, "max_retries": 0}
        self._tasks = {task: ray.remote(**options)(task) for task in (_update, _score)}
        self._run = uuid.uuid4().hex
        self._shared = ray.put(replace(workload, clients=(), plans=()))
        self._clients = [ray.put(client) for client in workload.clients]

    def _connect(self, workers: int, address: str | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": "error"}
        if address is None:
            # "local" even where RAY_ADDRESS is set: that variable is not our config. The workers
            # find modules, a user's own parts too, where this process finds them.
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
            _knock(address)
            self._ray.init(address=address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InvalidValueError(
                "training.ray_address", address, f"must be a running Ray cluster ({reason})"
            ) from error

    def updates(self, theta: Tensor, round_number: int, members: Sequence[int]) -> list[Tensor]:
        """See `Executor`."""
        found = self._all(_update, theta, members, f"round {round_number}", round_number)
        return [torch.from_numpy(found[member].copy()).to(theta.device) for member in members]

    def evaluate(self, theta: Tensor) -> list[Scores]:
        """See `Executor`."""
        everyone = range(len(self._workload.clients))
        found = self._all(_score, theta, everyone, "an evaluation")
        return [found[member] for member in everyone]

    def _all(
        self, task: Callable[..., Any], theta: Tensor, members: Sequence[int], what: str, *more: int
    ) -> dict[int, Any]:
        """The answers of a task for all members, whoever dies meanwhile."""
        ray, plans = self._ray, self._workload.plans
        remote, parameters = self._tasks[task], ray.put(theta.cpu().numpy())
        found: dict[int, Any] = {}
        errors = ray.exceptions
        deaths = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)

        def attempt(some: list[int]) -> list[int]:
            sent = {
                member: remote.remote(
                    self._run, self._shared, self._clients[member], plans[member], parameters, *more
                )
                for member in longest_first(self._workload, some)
            }
            for member, reference in sent.items():
                try:
                    found[member] = ray.get(reference)
                except deaths:
                    continue
                except errors.RayTaskError as error:
                    if isinstance(error.cause, errors.RaySystemError):
                        raise NoisewiseError(
                            "a Ray worker cannot read its task; are noisewise and your own modules "
                            f"installed on the cluster? {str(error.cause).splitlines()[0]}"
                        ) from error
                    raise error.cause from error
            return [member for member in some if member not in found]

        until_done(attempt, self._workload, members, what)
        return found

    def close(self) -> None:
        """End the cluster that was started here, or leave the one that was there before."""
        self._clients, self._shared = [], None
        if self._ours:
            self._ray.shutdown()
