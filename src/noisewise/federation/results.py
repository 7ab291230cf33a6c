"""The results of a run: a record for each round and a summary of the whole run, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import numpy as np

from noisewise.aggregation.base import Disclosure
from noisewise.errors import InvalidValueError
from noisewise.privacy.declaration import Declaration, read_declaration

__all__ = [
    "ClientFacts",
    "RoundRecord",
    "RunResult",
    "RunSettings",
    "Status",
    "load_result",
    "load_run",
    "read_record",
]

Status = Literal["finished", "diverged", "budgets_spent", "no_updates", "unfinished"]

# Exceptions when JSON of another shape is read.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


class ClientFacts(TypedDict, total=False):
    """What a result says about one client, as it is in ``result.json``.

    A simulation has all fields but ``declared``. Of a real site there is ``declared`` only: the
    site's `Declaration` as a mapping, or None.
    """

    id: str
    n_examples: int
    batch_size: int
    local_epochs: int
    epsilon: float
    delta: float
    reported_epsilon: float | None
    planned_epsilon: float | None
    noise_multiplier: float
    sample_rate: float
    steps_per_round: int
    planned_rounds: int
    declared: Mapping[str, Any] | None


class RunSettings(TypedDict, total=False):
    """Settings of a run, as they are in ``result.json``.

    Both kinds of runs have ``rounds``, ``learning_rate`` (of the clients' local steps) and
    ``participation``. ``server_rate`` is "auto" if `AutoSteps` sets the server's steps. A
    simulation adds its other `TrainingSettings`, ``clip_norm`` and ``accountant``; a server adds
    ``min_clients`` and ``noise_floor``.
    """

    rounds: int
    learning_rate: float
    server_rate: Literal["auto"]
    participation: float
    evaluate_every: int
    physical_batch: int
    device: str
    loss_records: int
    clip_norm: float | None
    accountant: str
    min_clients: int
    noise_floor: float | None


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round. A server knows only some of the fields.

    Attributes:
        round: counted from 1.
        weights: aggregation weight of each client whose update was used.
        dropped: why updates of other clients were not used.
        noise_estimate: the server's estimate of each update's noise energy, if it made one.
        noise_converged: whether the estimator converged.
        true_noise: closed-form noise energy of each update; simulator only.
        aggregate_noise: noise energy of the change of the global model; simulator only, and None if
            the aggregate is not a weighted sum (PFA).
        oracle_noise: the smallest noise energy that any weights reach with every client's own
            budget; simulator only.
        epsilon_spent: by each client so far, None without privacy; simulator only.
        signal_share: signal-to-noise ratio of the aggregate divided by the best one (see
            `noisewise.noise.variance.signal_share`); None as for ``aggregate_noise``.
        accuracy: on each client's held-out records, or on a server's public records; None if the
            round was not evaluated.
        train_loss: on each client's training records; simulator only.
        noised_accuracy: the accuracies that sites of a real federation chose to send, each with
            noise of its own; None if the server did not ask.
    """

    round: int
    weights: Mapping[str, float]
    dropped: Mapping[str, str]
    noise_estimate: Mapping[str, float] | None
    noise_converged: bool | None
    true_noise: Mapping[str, float] = field(default_factory=dict)
    aggregate_noise: float | None = None
    oracle_noise: float | None = None
    epsilon_spent: Mapping[str, float | None] = field(default_factory=dict)
    accuracy: Mapping[str, float] | None = None
    train_loss: Mapping[str, float] | None = None
    signal_share: float | None = None
    noised_accuracy: Mapping[str, float] | None = None

    @property
    def used(self) -> frozenset[str]:
        """Clients whose updates were used; a guard's refusals have a weight of 0."""
        return frozenset(self.weights) - frozenset(self.dropped)

    @property
    def changed(self) -> bool:
        """Whether the round's updates changed the model."""
        return bool(self.weights)

    @property
    def mean_noised_accuracy(self) -> float:
        """Mean over the sites that sent one; NaN if none did."""
        accuracies = list((self.noised_accuracy or {}).values())
        return float(np.mean(accuracies)) if accuracies else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean over clients; NaN if the round was not evaluated."""
        return math.nan if self.accuracy is None else float(np.mean(list(self.accuracy.values())))

    @property
    def mean_train_loss(self) -> float:
        """Mean over clients; NaN if unknown or not finite."""
        losses = [] if self.train_loss is None else list(self.train_loss.values())
        return float(np.mean(losses)) if losses else math.nan

    @property
    def noise_ratio(self) -> float:
        """Noise of the aggregate divided by the oracle's: 1 is the best, 0 means no noise."""
        if self.aggregate_noise == 0:
            return 0.0
        if self.aggregate_noise is None or not self.oracle_noise:
            return math.nan
        return self.aggregate_noise / self.oracle_noise


@dataclass(frozen=True)
class RunResult:
    """A whole run.

    Attributes:
        method: its name.
        seed: of split, initial model, sampling and noise.
        status: ``finished``, ``diverged`` (parameters or loss became NaN or infinite),
            ``budgets_spent`` (no client was left to take part), ``no_updates`` (the run ended and
            no round changed the model: there is no trained model) or ``unfinished`` (the run has
            not ended, or can be resumed).
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

    @property
    def is_reference(self) -> bool:
        """Whether it is for comparison only: no privacy, no common model, or the true noise."""
        known = Disclosure.TRUE_VARIANCE.value in self.needs
        return known or not self.shares_model or (self.guarantee is None and not self.deployed)

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
        return next((r for r in reversed(self.rounds) if r.accuracy is not None), None)

    @property
    def accuracy(self) -> float:
        """Mean held-out accuracy over clients after the last evaluated round; NaN without one."""
        last = self.last_evaluated
        return math.nan if last is None else last.mean_accuracy

    @property
    def _accuracies(self) -> Mapping[str, float]:
        last = self.last_evaluated
        return {} if last is None or last.accuracy is None else last.accuracy

    @property
    def accuracy_spread(self) -> float:
        """Standard deviation of the clients' accuracies: the paper's fairness."""
        scores = list(self._accuracies.values())
        return float(np.std(scores)) if scores else math.nan

    @property
    def worst_tenth_accuracy(self) -> float:
        """Mean accuracy of the worst tenth of the clients (at least one)."""
        scores = sorted(self._accuracies.values())
        return float(np.mean(scores[: math.ceil(len(scores) / 10)])) if scores else math.nan

    @property
    def smallest_client_accuracy(self) -> float:
        """Accuracy of the client with the fewest training records; NaN for real sites."""
        if not self._accuracies or self.deployed:
            return math.nan
        smallest = min(self.clients, key=lambda client: self.clients[client]["n_examples"])
        return self._accuracies[smallest]

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
        fields = {name: value for name, value in asdict(self).items() if name != "rounds"}
        return fields | {
            "rounds_done": len(self.rounds),
            "rounds_changed": self.rounds_changed,
            "accuracy": self.accuracy,
            "accuracy_spread": self.accuracy_spread,
            "smallest_client_accuracy": self.smallest_client_accuracy,
            "train_loss": self.train_loss,
            "noise_ratio": self.noise_ratio,
            "signal_share": self.signal_share,
            "largest_epsilon": self.largest_epsilon,
            "epsilon_spent": dict(self.epsilon_spent),
        }


def read_record(line: str | bytes) -> RoundRecord:
    """Read a record from its line of ``rounds.jsonl``.

    In mappings, null is a number that was not finite. In ``epsilon_spent``, null means no privacy.
    """
    fields = json.loads(line)
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("epsilon_spent", "dropped"):
            fields[name] = {k: math.nan if v is None else v for k, v in value.items()}
    return RoundRecord(**fields)


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
    )


def load_result(folder: Path | str) -> RunResult:
    """Read a finished run from its folder (``result.json`` and ``rounds.jsonl``).

    Raises:
        InvalidValueError: there is no finished run, or the two files do not agree.
    """
    folder = Path(folder)
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
        return result
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
    if (folder / "result.json").exists():
        return load_result(folder)
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
