"""The results of a run: a record for each round and a summary of the whole run, as JSON."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from torch import Tensor, nn

from noisewise.aggregation.base import Disclosure
from noisewise.errors import InvalidValueError
from noisewise.federation.notebook_view import notebook_html
from noisewise.federation.result_facts import ClientFacts, RunSettings
from noisewise.federation.round_record import RoundRecord, read_record
from noisewise.federation.round_table import data_frame, round_rows
from noisewise.federation.task_info import TaskInfo, read_task, spread, worst_tenth
from noisewise.federation.trained_model import MODEL_FILE, ModelStructure, TrainedModel
from noisewise.privacy.declaration import Declaration, read_declaration
from noisewise.text import short_repr
from noisewise.training.metrics import MetricInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "RunResult",
    "Status",
    "load_result",
    "load_run",
]

Status = Literal["finished", "stopped", "diverged", "budgets_spent", "no_updates", "unfinished"]

# Exceptions when JSON of another shape is read.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, repr=False)
class RunResult:
    """A whole run.

    Attributes:
        method: its name.
        seed: of split, initial model, sampling and noise.
        status: ``finished``, ``stopped`` (by ``stop_when``), ``diverged`` (parameters or loss
            became NaN or infinite), ``budgets_spent`` (no client was left to take part),
            ``no_updates`` (the run ended and no round changed the model: there is no trained model)
            or ``unfinished`` (the run has not ended, or can be resumed).
        rounds: the records, in order.
        clients: what is known about each client, by id.
        guarantee: overall (epsilon, delta) of the run, None without privacy.
        settings: learning rate, rounds, accountant and so on.
        needs: what the method's server must know about the clients besides their updates.
        deployed: whether this is a server's record of real sites, about which it knows their
            updates only. Accuracy is then that of the server's own public records.
        shares_model: False if every client trained a model of its own (`Alone`); the accuracy of a
            client is then that of its own model, and every weight is 1.
        version: of the format of ``result.json``.
        task: its name and metrics.
        trained: the trained parameters; None if no round changed the model, or if the run is not
            finished. `model` and `state_dict` return them.

    Example:
        Of a finished run on disk:

            result = nw.load_result("runs/demo/runs/NoiseWise-seed0")
            result.accuracy, result.epsilon_spent["client-00"], result.rounds[-1].weights
    """

    method: str
    seed: int
    status: Status
    rounds: tuple[RoundRecord, ...]
    clients: Mapping[str, ClientFacts]
    guarantee: Mapping[str, float] | None
    settings: RunSettings
    needs: tuple[str, ...] = ()
    deployed: bool = False
    shares_model: bool = True
    version: int = 1
    task: TaskInfo = field(default_factory=TaskInfo)
    trained: TrainedModel | None = field(default=None, compare=False)

    @property
    def unit(self) -> str:
        """What the budgets of a simulation's clients protect: "record", "person", or both."""
        return " or ".join(sorted({facts.get("unit", "record") for facts in self.clients.values()}))

    def __repr__(self) -> str:
        """One line: method, seed, status and the main figures."""
        figures = {self.metric.name: self.score, "largest_epsilon": self.largest_epsilon}
        return short_repr(
            self, method=self.method, seed=self.seed, status=self.status, rounds=len(self.rounds),
            clients=len(self.clients), **figures,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """A table and the curve of the main metric, for notebooks."""
        figures = {
            "method": self.method,
            "seed": str(self.seed),
            "status": self.status,
            "rounds": str(len(self.rounds)),
            "clients": str(len(self.clients)),
            **{m.name: m.text(self.figure(m.name)) for m in self.task.metrics},
            "largest epsilon": f"{self.largest_epsilon:.4g}",
        }
        metric = self.metric
        curve = [(r.round, metric.scale * r.figure(metric.name)) for r in self.rounds]
        # report/ is above this folder; it is imported when it is needed.
        style = importlib.import_module("noisewise.report.chart").method_styles([self.method])
        colours = {self.method: style[self.method].colour}
        return notebook_html(
            list(figures), [list(figures.values())], {self.method: curve}, metric.label, colours
        )

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row for each round; needs the extra ``frame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(round_rows(self))

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the main metric over the rounds, as in the report.

        Args:
            axes: of matplotlib; by default those of a new figure.

        Raises:
            InvalidValueError: no round was evaluated.
        """
        # report/ is above this folder; it is imported when it is needed.
        plots = importlib.import_module("noisewise.report.run_plots")
        drawn: Axes = plots.plot_runs([self], axes)
        return drawn

    @cached_property
    def model(self) -> nn.Module:
        """A new module with the trained parameters, in evaluation mode; the same at each access.

        Raises:
            InvalidValueError: there is no trained model, or its code is not known (`load_result`):
                `noisewise.load_model` fills a model of yours.
        """
        return self._trained.new_module()

    def state_dict(self) -> dict[str, Tensor]:
        """The trained model's tensors by name, as `torch.nn.Module.load_state_dict` takes them.

        Raises:
            InvalidValueError: there is no trained model, or its file is missing or damaged.
        """
        return self._trained.state_dict()

    @property
    def _trained(self) -> TrainedModel:
        if self.trained is not None:
            return self.trained
        allowed = "there is no trained model: no round changed it"
        if not self.shares_model:
            allowed = (
                f"every client of {self.method} has a model of its own: run with a folder, then "
                "noisewise.load_model(folder / 'clients' / ..., model)"
            )
        raise InvalidValueError("model", None, allowed)

    def with_model_in(self, folder: Path, model: nn.Module | None = None) -> RunResult:
        """The same result with the model in a folder, if there is one.

        Args:
            folder: of the run.
            model: with the structure of the run's model; None if its code is not known.
        """
        file = folder / MODEL_FILE
        structure = None if model is None else ModelStructure.of(model)
        return replace(self, trained=TrainedModel(file, structure) if file.exists() else None)

    @property
    def is_reference(self) -> bool:
        """Whether it is for comparison only: no privacy, no common model, or the true noise."""
        needs_true_noise = Disclosure.TRUE_VARIANCE.value in self.needs
        return (
            needs_true_noise
            or not self.shares_model
            or (self.guarantee is None and not self.deployed)
        )

    @property
    def own_budgets(self) -> bool:
        """Whether every client planned with its own epsilon, not with a smaller one of others."""
        return all(c.get("planned_epsilon") == c.get("epsilon") for c in self.clients.values())

    @property
    def declarations(self) -> Mapping[str, Declaration]:
        """What sites of a real federation declare, by client id; the server did not check it."""
        fields = {client: facts.get("declared") for client, facts in self.clients.items()}
        return {
            client: read_declaration(declared) for client, declared in fields.items() if declared
        }

    @property
    def rounds_changed(self) -> int:
        """How many rounds changed the model."""
        return sum(record.changed for record in self.rounds)

    @property
    def last_evaluated(self) -> RoundRecord | None:
        """The last round that was evaluated."""
        return next((r for r in reversed(self.rounds) if r.evaluated), None)

    @property
    def metric(self) -> MetricInfo:
        """The task's main metric."""
        return self.task.main

    def figure(self, metric: str) -> float:
        """A metric over all clients after the last evaluated round; NaN if there is none."""
        last = self.last_evaluated
        return math.nan if last is None else last.figure(metric)

    def by_client(self, metric: str) -> Mapping[str, float]:
        """A metric at each client after the last evaluated round; empty if there is none."""
        last = self.last_evaluated
        return {} if last is None else last.by_client(metric)

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric of the task over all clients, after the last evaluated round."""
        return {metric.name: self.figure(metric.name) for metric in self.task.metrics}

    @property
    def score(self) -> float:
        """The main metric over all clients after the last evaluated round; NaN without one."""
        return self.figure(self.metric.name)

    @property
    def score_spread(self) -> float:
        """Standard deviation of the clients' main metric: the paper's fairness."""
        return spread(self.by_client(self.metric.name))

    @property
    def worst_tenth_score(self) -> float:
        """Mean of the main metric over the worst tenth of the clients (at least one)."""
        return worst_tenth(self.metric, self.by_client(self.metric.name))

    @property
    def smallest_client_score(self) -> float:
        """The main metric of the client with the fewest training records; NaN for real sites."""
        scores = self.by_client(self.metric.name)
        if not scores or self.deployed:
            return math.nan
        smallest = min(self.clients, key=lambda client: self.clients[client]["n_examples"])
        return scores.get(smallest, math.nan)  # a run may evaluate a share of the clients

    @property
    def accuracy(self) -> float:
        """Mean held-out accuracy over clients after the last evaluated round.

        NaN without an evaluation, and for a task without the metric ``accuracy``: use `score`.
        """
        return self.figure("accuracy")

    @property
    def accuracy_spread(self) -> float:
        """`score_spread` if the main metric is the accuracy, else NaN."""
        return self._if_accuracy(self.score_spread)

    @property
    def worst_tenth_accuracy(self) -> float:
        """`worst_tenth_score` if the main metric is the accuracy, else NaN."""
        return self._if_accuracy(self.worst_tenth_score)

    @property
    def smallest_client_accuracy(self) -> float:
        """`smallest_client_score` if the main metric is the accuracy, else NaN."""
        return self._if_accuracy(self.smallest_client_score)

    def _if_accuracy(self, value: float) -> float:
        return value if self.metric.is_accuracy else math.nan

    @property
    def train_loss(self) -> float:
        """Mean train loss over clients after the last evaluated round."""
        last = self.last_evaluated
        return math.nan if last is None else last.mean_train_loss

    @property
    def noise_ratio(self) -> float:
        """Mean over rounds of the aggregate's noise divided by the oracle's."""
        ratios = [r.noise_ratio for r in self.rounds if math.isfinite(r.noise_ratio)]
        return float(np.mean(ratios)) if ratios else math.nan

    @property
    def signal_share(self) -> float:
        """Mean over rounds of the signal-to-noise ratio divided by the best one."""
        shares = [r.signal_share for r in self.rounds if r.signal_share is not None]
        return float(np.mean(shares)) if shares else math.nan

    @property
    def epsilon_spent(self) -> Mapping[str, float | None]:
        """By each client, after the last round."""
        return self.rounds[-1].epsilon_spent if self.rounds else {}

    @property
    def largest_epsilon(self) -> float:
        """The largest epsilon that any client spent; inf without privacy, NaN for real sites."""
        if self.deployed:
            return math.nan
        spent = list(self.epsilon_spent.values())
        return math.inf if None in spent else max((e for e in spent if e is not None), default=0.0)

    def summary(self) -> dict[str, Any]:
        """All fields except the rounds, and the figures of the last round, for JSON."""
        left_out = ("rounds", "trained")
        names = [each.name for each in fields(self) if each.name not in left_out]
        return {name: getattr(self, name) for name in names} | {
            "rounds_done": len(self.rounds),
            "rounds_changed": self.rounds_changed,
            "task": asdict(self.task),
            "score": self.score,
            "metrics": self.metrics,
            "accuracy": self.accuracy,
            "accuracy_spread": self.accuracy_spread,
            "smallest_client_accuracy": self.smallest_client_accuracy,
            "train_loss": self.train_loss,
            "noise_ratio": self.noise_ratio,
            "signal_share": self.signal_share,
            "largest_epsilon": self.largest_epsilon,
            "epsilon_spent": dict(self.epsilon_spent),
        }


def _from_summary(summary: Mapping[str, Any], records: tuple[RoundRecord, ...]) -> RunResult:
    settings = dict(summary["settings"])
    deployed = settings.pop("deployed", False)  # older files have it here
    return RunResult(
        method=summary["method"],
        seed=summary["seed"],
        status=summary["status"],
        rounds=records,
        clients=summary["clients"],
        guarantee=summary["guarantee"],
        settings=cast(RunSettings, settings),
        needs=tuple(summary["needs"]),
        deployed=bool(summary.get("deployed", deployed)),
        shares_model=bool(summary.get("shares_model", True)),  # older files do not have it
        task=read_task(summary.get("task")),
    )


def load_result(folder: Path | str) -> RunResult:
    """Read a finished run from its folder (``result.json`` and ``rounds.jsonl``).

    Args:
        folder: of the run.

    Returns:
        The result, with the trained model if the folder has one.

    Raises:
        InvalidValueError: there is no finished run, or the two files do not agree.

    Example:
        >>> load_result("nowhere")
        Traceback (most recent call last):
        ...
        noisewise.errors.InvalidValueError: folder = ...
    """
    folder = Path(folder)
    if not folder.is_dir():
        allowed = "must hold a finished run; there is no such folder"
        raise InvalidValueError("folder", str(folder), allowed)
    try:
        summary = json.loads((folder / "result.json").read_text())
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        result = _from_summary(summary, tuple(read_record(line) for line in lines))
        if len(result.rounds) != summary["rounds_done"]:
            raise ValueError(
                f"rounds.jsonl has {len(result.rounds)} rounds, not {summary['rounds_done']}"
            )
        if dict(result.epsilon_spent) != summary["epsilon_spent"]:
            raise ValueError("rounds.jsonl has another epsilon_spent than result.json")
        return result.with_model_in(folder)
    except _UNREADABLE as error:
        raise InvalidValueError(
            "folder", str(folder), f"must hold a finished run ({type(error).__name__}: {error})"
        ) from error


def load_run(folder: Path | str) -> RunResult:
    """Read a run, finished or not; of an unfinished run, the rounds that are complete.

    Raises:
        InvalidValueError: there is no run, or the folder has no ``run.json`` yet.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidValueError("folder", str(folder), "must hold a run; there is no such folder")
    if (folder / "result.json").exists():
        return load_result(folder)
    if not (folder / "run.json").exists():
        allowed = "must hold a run: it has no result.json and no run.json"
        raise InvalidValueError("folder", str(folder), allowed)
    records = []
    try:
        summary = json.loads((folder / "run.json").read_text())
        if (folder / "rounds.jsonl").exists():
            for line in (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # otherwise the record is incomplete
                    records.append(read_record(line))
        return _from_summary(summary, tuple(records))
    except _UNREADABLE as error:
        raise InvalidValueError(
            "folder",
            str(folder),
            f"must hold a run, with result.json or run.json ({type(error).__name__}: {error})",
        ) from error
