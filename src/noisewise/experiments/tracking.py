"""Metrics of each round for TensorBoard or MLflow; needs the extra ``track``, off by default."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from noisewise.errors import MissingExtraError
from noisewise.experiments.config import ExperimentConfig
from noisewise.federation.results import RunResult
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.round_table import round_metrics
from noisewise.storage import file_lock

__all__ = ["Tracked", "check_tracking", "run_name", "tracked"]

_LIBRARIES = {"tensorboard": ("TensorBoard", "tensorboard"), "mlflow": ("MLflow", "mlflow")}
_EXPERIMENT = "noisewise"
_LONGEST_PARAMETER = 500


class Tracker(Protocol):
    """Receives the metrics of rounds."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of one round; a resumed run sends its earlier rounds again."""
        ...

    def close(self, status: str) -> None:
        """End with a status: ``FINISHED``, ``FAILED`` or ``KILLED``."""
        ...


def check_tracking(config: ExperimentConfig) -> None:
    """Check that the libraries of the config's trackers are installed.

    Raises:
        MissingExtraError: with the install command.
    """
    for field, (name, module) in _LIBRARIES.items():
        if getattr(config.track, field) and importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"track.{field} needs {name}: pip install 'noisewise[track]'")


def run_name(folder: Path | None, fallback: str) -> str:
    """The name of a run: the last parts of its folder, such as ``demo/RobustHDP-seed0``."""
    parts = [p for p in folder.parts if p not in ("runs", "/", "..")][-3:] if folder else []
    return re.sub(r"[^A-Za-z0-9.=_,+/-]+", "-", "/".join(parts)) or fallback


class Tracked:
    """Passes rounds on to the trackers of a run; `tracked` yields it."""

    def __init__(self, trackers: list[Tracker], on_round: Callable[[RoundRecord], None] | None):
        self._trackers, self._on_round = trackers, on_round
        self.status = "FAILED"

    def on_round(self, record: RoundRecord) -> None:
        """Pass a round on to the trackers and to the other listener."""
        for tracker in self._trackers:
            tracker.log(record.round, round_metrics(record))
        if self._on_round is not None:
            self._on_round(record)

    def end(self, result: RunResult) -> None:
        """Set the status from the result; a run without a trained model counts as failed."""
        failed = result.status in ("diverged", "no_updates")
        self.status = "FAILED" if failed else "FINISHED"


@contextmanager
def tracked(
    config: ExperimentConfig,
    name: str,
    on_round: Callable[[RoundRecord], None] | None,
    facts: Mapping[str, Any],
) -> Iterator[Tracked]:
    """Open the trackers that the config's ``[track]`` names, for the time of a run.

    Args:
        config: its ``track`` table; without entries nothing is loaded or written.
        name: of the run.
        on_round: another listener, called after the trackers.
        facts: method and seed, which distinguish this run from others of the config.
    """
    check_tracking(config)
    trackers: list[Tracker] = []
    if config.track.tensorboard:
        trackers.append(_TensorBoard(Path(config.track.tensorboard) / name))
    if config.track.mlflow:
        trackers.append(_Mlflow(config.track.mlflow, name, _parameters(config, facts)))
    listener = Tracked(trackers, on_round)
    with ExitStack() as stack:
        for tracker in trackers:
            stack.callback(_close, tracker, listener)
        try:
            yield listener
        except KeyboardInterrupt:
            listener.status = "KILLED"
            raise


def _close(tracker: Tracker, listener: Tracked) -> None:
    tracker.close(listener.status)


def _parameters(config: ExperimentConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    content = config.model_dump(exclude_none=True, exclude={"track", "compare", "method", "seed"})
    flat: dict[str, Any] = {}
    for name, value in content.items():
        table = value if isinstance(value, dict) else {"": value}  # `attacks` is a list of tables
        flat |= {f"{name}.{key}".rstrip("."): entry for key, entry in table.items()}
    return {key: str(value)[:_LONGEST_PARAMETER] for key, value in {**flat, **facts}.items()}


class _TensorBoard:
    """Event files. They are made at the first round, so a finished run that is read writes none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # A resumed run sends all rounds again, so the events of earlier attempts are purged.
            resumed = step if any(self._folder.glob("events.*")) else None
            library = importlib.import_module("torch.utils.tensorboard.writer")
            self._writer = library.SummaryWriter(str(self._folder), purge_step=resumed)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class _Mlflow:
    """A run of the experiment ``noisewise``; an interrupted one is resumed."""

    def __init__(self, location: str, name: str, parameters: Mapping[str, str]) -> None:
        self._location, self._name, self._parameters = location, name, parameters
        self._client: Any = None
        self._run = ""
        self._last = 0

    def _open(self) -> None:
        # A tool for privacy does not send usage data unless the user asks for it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        make_client = importlib.import_module("mlflow.tracking").MlflowClient
        if "://" in self._location:
            self._client = make_client(tracking_uri=self._location)
            self._start_run(None)
            return
        folder = Path(self._location).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / ".lock"):  # two processes must not both create the tables
            self._client = make_client(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
            self._start_run((folder / "artifacts").as_uri())

    def _start_run(self, artifacts: str | None) -> None:
        """Find the run with the same parameters, or create one."""
        existing = self._client.get_experiment_by_name(_EXPERIMENT)
        if existing is None:
            experiment = self._client.create_experiment(_EXPERIMENT, artifact_location=artifacts)
        else:
            experiment = existing.experiment_id
        identity = hashlib.sha256(repr(sorted(self._parameters.items())).encode()).hexdigest()
        tags = {"noisewise.run": self._name, "noisewise.identity": identity}
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        same = self._client.search_runs([experiment], filter_string=query, max_results=1)
        if same:
            self._run = same[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            history = self._client.get_metric_history(self._run, "largest_weight")
            self._last = max((entry.step for entry in history), default=0)
            return
        created = self._client.create_run(experiment, tags=tags, run_name=self._name)
        self._run = created.info.run_id
        for key, value in self._parameters.items():
            self._client.log_param(self._run, key, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._client is None:
            self._open()
        if step <= self._last:
            return
        metric = importlib.import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        metrics = [metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run, status=status)
