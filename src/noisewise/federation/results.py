"""What a run leaves behind: a record for each round and a result for the whole, as plain JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from noisewise.errors import InvalidValueError
from noisewise.federation.claims import Declaration, read_declaration

__all__ = [
    "AttackRow",
    "ClientRow",
    "RoundRecord",
    "RunResult",
    "Status",
    "load_result",
    "load_run",
    "read_record",
    "to_json",
]

Status = Literal["finished", "diverged", "budgets_spent", "no_updates", "unfinished"]

# What reading JSON of another shape raises.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def _plain(value: Any) -> Any:
    """Numbers that JSON knows: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text with null for numbers that are not finite; the same input gives the same bytes."""
    return json.dumps(_plain(value), indent=indent, sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class ClientRow:
    """One client of a population as a report shows it.

    Attributes:
        id: its name.
        n_examples: N.
        batch_size: b.
        epsilon: its budget.
        steps_per_round: E_i.
        noise_multiplier: z.
        noise_variance: sigma^2, the noise energy of one update.
        oracle_weight: what perfect knowledge of all sigma^2 would give it.
    """

    id: str
    n_examples: int
    batch_size: int
    epsilon: float
    steps_per_round: int
    noise_multiplier: float
    noise_variance: float
    oracle_weight: float


@dataclass(frozen=True)
class AttackRow:
    """One method under one attack.

    Attributes:
        method: label.
        attack: its name, or ``no attack``.
        attackers: how many.
        weight: of all attackers together, mean over rounds.
        accuracy: of the last round, mean over clients.
        without_attack: the same for the method left alone.
        breaks_policy: whether no honest client could have sent the update.
        diverged: whether the run left the finite numbers.
        honest_refused: how many updates of honest clients were dropped, over all rounds.
    """

    method: str
    attack: str
    attackers: int
    weight: float
    accuracy: float
    without_attack: float
    breaks_policy: bool
    diverged: bool
    honest_refused: int = 0

    @property
    def loss(self) -> float:
        """Accuracy that the attack cost."""
        return self.without_attack - self.accuracy


@dataclass(frozen=True)
class RoundRecord:
    """One round as the simulator saw it; the server saw far less.

    Attributes:
        round: counted from 1.
        weights: aggregation weight of each client whose update was used.
        dropped: why other participants' updates were not used.
        noise_estimate: the server's estimate of each update's noise energy, where it made one.
        noise_converged: whether the server trusts its estimate.
        true_noise: closed-form noise energy of each update.
        aggregate_noise: noise energy of the new global model's change; None where the aggregate is
            not a weighted sum (PFA).
        oracle_noise: the least that weights could have reached with every client's own budget.
        epsilon_spent: by each client of the federation so far; None without privacy.
        signal_share: signal-to-noise ratio of the aggregate over the best attainable (see
            `noisewise.noise.variance.signal_share`), from the true noise; None as above.
        accuracy: of each client's held-out records; None where the round was not evaluated.
        train_loss: of each client's training records.
        noised_accuracy: in a real federation, what sites that chose to tell of their accuracy, each
            with noise of its own; None where nobody was asked.
    """

    round: int
    weights: Mapping[str, float]
    dropped: Mapping[str, str]
    noise_estimate: Mapping[str, float] | None
    noise_converged: bool | None
    true_noise: Mapping[str, float]
    aggregate_noise: float | None
    oracle_noise: float | None
    epsilon_spent: Mapping[str, float | None]
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
        """Whether the round's updates moved the model."""
        return bool(self.weights)

    @property
    def mean_noised_accuracy(self) -> float:
        """Mean over the sites that told; NaN where none did."""
        told = list((self.noised_accuracy or {}).values())
        return float(np.mean(told)) if told else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean over clients; NaN where the round was not evaluated."""
        return math.nan if self.accuracy is None else float(np.mean(list(self.accuracy.values())))

    @property
    def mean_train_loss(self) -> float:
        """Mean over clients; NaN where unknown or not finite."""
        losses = [] if self.train_loss is None else list(self.train_loss.values())
        return float(np.mean(losses)) if losses else math.nan

    @property
    def noise_ratio(self) -> float:
        """Noise of the aggregate over the oracle's: 1 is perfect, 0 is no noise at all."""
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
            not ended).
        rounds: the records, in order.
        clients: settings of each client by id: n_examples, batch_size, epsilon, delta, ...
        guarantee: overall (epsilon, delta) of the run, None without privacy.
        settings: learning rate, rounds, accountant and so on.
        needs: what the server had to be told.
    """

    method: str
    seed: int
    status: Status
    rounds: tuple[RoundRecord, ...]
    clients: Mapping[str, Mapping[str, Any]]
    guarantee: Mapping[str, float] | None
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    version: int = field(default=1)

    @property
    def deployed(self) -> bool:
        """Whether this is a server's record of real sites, of which it knows no more than updates.

        Accuracy is then that of the server's own public records.
        """
        return bool(self.settings.get("deployed", False))

    @property
    def declarations(self) -> Mapping[str, Declaration]:
        """What sites of a real federation declare, by client id; no server checked it."""
        fields = {client: known.get("declared") for client, known in self.clients.items()}
        return {client: read_declaration(told) for client, told in fields.items() if told}

    @property
    def rounds_changed(self) -> int:
        """How many rounds changed the model."""
        return sum(record.changed for record in self.rounds)

    @property
    def last_evaluated(self) -> RoundRecord | None:
        """The last round with an evaluation."""
        return next((r for r in reversed(self.rounds) if r.accuracy is not None), None)

    @property
    def accuracy(self) -> float:
        """Mean held-out accuracy over clients after the last evaluated round; NaN without one."""
        last = self.last_evaluated
        return math.nan if last is None else last.mean_accuracy

    @property
    def accuracy_spread(self) -> float:
        """Standard deviation of the clients' accuracies: the paper's fairness."""
        last = self.last_evaluated
        if last is None or last.accuracy is None:
            return math.nan
        return float(np.std(list(last.accuracy.values())))

    @property
    def worst_tenth_accuracy(self) -> float:
        """Mean accuracy of the worst tenth of the clients (at least one)."""
        last = self.last_evaluated
        if last is None or last.accuracy is None:
            return math.nan
        scores = sorted(last.accuracy.values())
        return float(np.mean(scores[: math.ceil(len(scores) / 10)]))

    @property
    def smallest_client_accuracy(self) -> float:
        """Accuracy of the client with the fewest training records."""
        last = self.last_evaluated
        if last is None or last.accuracy is None or self.deployed:
            return math.nan
        smallest = min(self.clients, key=lambda client: self.clients[client]["n_examples"])
        return last.accuracy[smallest]

    @property
    def train_loss(self) -> float:
        """Mean train loss over clients after the last evaluated round."""
        last = self.last_evaluated
        return math.nan if last is None else last.mean_train_loss

    @property
    def noise_ratio(self) -> float:
        """Mean over rounds of the aggregate's noise over the oracle's."""
        ratios = [r.noise_ratio for r in self.rounds if math.isfinite(r.noise_ratio)]
        return float(np.mean(ratios)) if ratios else math.nan

    @property
    def signal_share(self) -> float:
        """Mean over rounds of the signal-to-noise ratio over the best attainable one."""
        shares = [r.signal_share for r in self.rounds if r.signal_share is not None]
        return float(np.mean(shares)) if shares else math.nan

    @property
    def epsilon_spent(self) -> Mapping[str, float | None]:
        """By each client, after the last round."""
        return self.rounds[-1].epsilon_spent if self.rounds else {}

    @property
    def largest_epsilon(self) -> float:
        """The largest epsilon that any client spent; inf without privacy, NaN if nobody told."""
        if self.deployed:
            return math.nan
        spent = list(self.epsilon_spent.values())
        return math.inf if None in spent else max((e for e in spent if e is not None), default=0.0)

    def summary(self) -> dict[str, Any]:
        """The whole run but its rounds, and the figures of the last one."""
        whole = {k: v for k, v in asdict(self).items() if k != "rounds"}
        return whole | {
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
    """A record from its line of ``rounds.jsonl``; null stands for a number that was not finite.

    Only in ``epsilon_spent`` does it mean what it says: no privacy, so no epsilon.
    """
    fields = json.loads(line)
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("epsilon_spent", "dropped"):
            fields[name] = {k: math.nan if v is None else v for k, v in value.items()}
    return RoundRecord(**fields)


def _from_summary(summary: Mapping[str, Any], records: tuple[RoundRecord, ...]) -> RunResult:
    return RunResult(
        method=summary["method"],
        seed=summary["seed"],
        status=summary["status"],
        rounds=records,
        clients=summary["clients"],
        guarantee=summary["guarantee"],
        settings=summary["settings"],
        needs=tuple(summary["needs"]),
    )


def load_result(folder: Path | str) -> RunResult:
    """Read a finished run back from its folder (``result.json`` and ``rounds.jsonl``).

    Raises:
        InvalidValueError: if it holds none, or if the two files do not agree.
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
    """Read a run, finished or not; of an unfinished one, the rounds that are whole.

    Raises:
        InvalidValueError: if there is no run, or one that an older version has only begun.
    """
    folder = Path(folder)
    if (folder / "result.json").exists():
        return load_result(folder)
    records = []
    try:
        summary = json.loads((folder / "run.json").read_text())
        if (folder / "rounds.jsonl").exists():
            for line in (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # else a round was being written, or a crash cut it
                    records.append(read_record(line))
        return _from_summary(summary, tuple(records))
    except _UNREADABLE as error:
        raise InvalidValueError(
            "folder",
            str(folder),
            f"must hold a run, with result.json or run.json ({type(error).__name__}: {error})",
        ) from error
