"""`NoiseAware`: any of our aggregators as a Flower strategy. Transport only, no mathematics.

The strategy reads replies one by one as they arrive, checks them, and keeps the updates on disk
until the round closes. The same server step and run loop as in a simulation do the rest. Memory:
the matrix of the round's updates, 4 p n bytes (0.9 GB for 11.2 million parameters and 20 clients),
plus about a dozen vectors of 4 p bytes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from noisewise.aggregation.auto_steps import AUTO, AutoSteps
from noisewise.aggregation.base import Aggregator, Disclosure
from noisewise.aggregation.methods import Method, make_method
from noisewise.checks import (
    fraction,
    non_negative_int,
    non_negative_number,
    positive_int,
    positive_number,
)
from noisewise.errors import InvalidValueError, UpdateError
from noisewise.federation.checkpoint import RunFolder, alone_in
from noisewise.federation.fingerprint import server_fingerprint
from noisewise.federation.result_facts import RunSettings
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.run_loop import RunLoop, result_before_training
from noisewise.federation.server_rules import Disclosed, ServerRules
from noisewise.federation.server_step import ServerStep, with_unforeseen_samples
from noisewise.federation.spool import Spool
from noisewise.federation.task_info import TaskInfo
from noisewise.federation.trained_model import ModelStructure
from noisewise.flower import show_log
from noisewise.flower.bad_replies import MAX_BAD_REPLIES, BadReplies
from noisewise.flower.collecting import Replies, collect_accuracies, collect_updates
from noisewise.flower.declaration_messages import declaration_questions, read_declarations
from noisewise.flower.parameter_records import layout_of, read_theta, to_record
from noisewise.flower.public_scores import Evaluate, with_public_scores
from noisewise.flower.replies import OpenRound
from noisewise.flower.reply_stream import fetch_replies, senders
from noisewise.flower.round_log import note_round
from noisewise.flower.run_configs import check_configs
from noisewise.flower.run_ending import closing_on_error, end_run
from noisewise.flower.wire import ARRAYS, CONFIG, LEARNING_RATE, NOISED_ACCURACY, ROUND
from noisewise.randomness import keyed_generator
from noisewise.training.parameters import ParameterLayout
from noisewise.training.tasks import CLASSIFICATION, Task

__all__ = ["NoiseAware"]

_log = logging.getLogger(__name__)


class NoiseAware(Strategy):  # type: ignore[misc, unused-ignore]
    """A Flower strategy around a method or an aggregator.

    Example::

        strategy = NoiseAware("RobustHDP", learning_rate=0.2, folder="runs/ward")
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=20)

    Args:
        method: a `Method`, the name of one, or an aggregator. NoiseWise divides updates by their
            steps: it needs ``server_steps``, and ``normalise = true`` in the file of every site.
        learning_rate: of the clients' local steps; a site takes part if it is within its limits.
            "auto" is for heads on features of norm 1: the server sets the length of its own steps
            (`noisewise.aggregation.auto_steps.AutoSteps`), and sites train at the rate
            1 / ``server_steps``, or 1 if the method has none.
        folder: for checkpoints and results; a partial run is resumed.
        min_clients: number of clients to wait for. A round with fewer usable updates leaves the
            model as it was.
        participation: share of the connected clients that is asked in a round.
        disclosed: for methods that need epsilons or numbers of records: values by node id.
        round_seconds: time limit of a round; clients that have not answered are left out.
        wait_seconds: how long to wait for ``min_clients`` to connect.
        failures_allowed: number of rounds in a row that may leave the model as it was.
        poll_seconds: time between two requests for replies.
        seed: of the choice of clients.
        declaration_seconds: how long to wait, before a site's first round, for the unit and budget
            that the site declares if its file allows it; the report repeats them as the site's
            claim. At most ``round_seconds``; 0 does not ask.
        evaluate_every: number of rounds between two requests to the round's clients for a noised
            accuracy of the new model. A site answers if its file allows it; the answer costs
            budget. 0 does not ask.
        task: of the run, for the metrics on public records and for reports.
        max_bad_replies: a site that sends this number of unusable replies in a row (undecodable,
            another shape, not finite, ...) is not asked again until the server is restarted. A site
            that does not answer, or does not take part, is asked again.

    Raises:
        InvalidValueError: the method needs something that a server may not know or that is not
            disclosed, or an argument is out of range.
    """

    def __init__(
        self,
        method: Method | Aggregator | str,
        *,
        learning_rate: float | Literal["auto"],
        folder: Path | str | None = None,
        min_clients: int = 2,
        participation: float = 1.0,
        disclosed: Mapping[Disclosure, Mapping[int, float]] | None = None,
        round_seconds: float = 3600.0,
        wait_seconds: float = 600.0,
        failures_allowed: int = 2,
        poll_seconds: float = 1.0,
        seed: int = 0,
        evaluate_every: int = 0,
        declaration_seconds: float = 120.0,
        max_bad_replies: int = MAX_BAD_REPLIES,
        task: Task = CLASSIFICATION,
    ) -> None:
        show_log()
        self.task = TaskInfo.of(_as_task(task))
        self.method = with_unforeseen_samples(_as_method(method))
        self._rules = ServerRules(self.method, _by_client(disclosed or {}), min_clients)
        self._auto = learning_rate == AUTO
        if self._auto:
            learning_rate = 1.0 / (self.method.server_steps or 1.0)
        elif self.method.normalise and self.method.server_steps is None:
            raise InvalidValueError(
                "server_steps", None, "must be given: a server does not know the sites' plans"
            )
        self.learning_rate = positive_number("learning_rate", learning_rate)
        self.min_clients = min_clients
        self.participation = fraction("participation", participation)
        self.round_seconds = positive_number("round_seconds", round_seconds)
        self.wait_seconds = positive_number("wait_seconds", wait_seconds)
        self.failures_allowed = positive_int("failures_allowed", failures_allowed)
        self.poll_seconds = positive_number("poll_seconds", poll_seconds)
        self.folder = None if folder is None else Path(folder)
        self.seed = non_negative_int("seed", seed)
        self.evaluate_every = evaluate_every and positive_int("evaluate_every", evaluate_every)
        self.declaration_seconds = non_negative_number("declaration_seconds", declaration_seconds)
        self._asked_to_declare: set[int] = set()
        self.bad_replies = BadReplies(max_bad_replies)
        self.run: RunLoop | None = None
        self._layout: ParameterLayout | None = None
        self._asked: dict[int, Message] = {}
        self._questions: dict[int, Message] = {}

    # ------------------------------------------------------------ the whole run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Play the rounds that are left; see Flower's `Strategy.start`.

        Args:
            grid: Flower's.
            initial_arrays: trainable parameters; those of a checkpoint take precedence.
            num_rounds: total number of rounds, including those before a restart.
            timeout: time limit of a round in seconds; overrides ``round_seconds``.
            train_config: may repeat the strategy's learning rate, as ``lr`` or ``learning-rate``;
                sites accept nothing else.
            evaluate_config: must be empty.
            evaluate_fn: (round, arrays) -> metrics on public records; those of the task
                are recorded.

        Raises:
            InvalidValueError: the folder belongs to another run, another process trains this run,
                or a config has something that no site accepts.
            NoUpdatesError: no round changed the model. The status of the run is ``no_updates``, and
                there is no model. Flower marks the run as failed.
            UpdateError: too few clients connected, or too many rounds in a row failed. The same
                call resumes the run.
        """
        check_configs(train_config, evaluate_config, self.learning_rate)
        seconds = self.round_seconds if timeout is None else positive_number("timeout", timeout)
        with alone_in(self.folder):
            if self._auto:
                auto = AutoSteps(positive_int("rounds", num_rounds))
                self.method = replace(self.method, auto=auto)
                self._rules = replace(self._rules, method=self.method)
            run = self._begin(initial_arrays, num_rounds)
            self.summary()
            result, failed = Result(), 0
            while not run.ended and failed <= self.failures_allowed:
                record = self._play_round(run, grid, seconds, evaluate_fn)
                note_round(record, self.task, result)
                failed = 0 if record.changed else failed + 1
            result.arrays = self._arrays(run.snapshot.released)
            end_run(run, failed)
            return result

    def _begin(self, initial: ArrayRecord, rounds: int) -> RunLoop:
        layout = self._layout = layout_of(initial)
        settings = RunSettings(
            rounds=positive_int("rounds", rounds),
            learning_rate=self.learning_rate,
            participation=self.participation,
            min_clients=self.min_clients,
            noise_floor=None if self.method.guard is None else self.method.guard.floor,
        )
        files = None
        if self.folder is not None:
            files = RunFolder(self.folder, server_fingerprint(self.method, repr(layout)))
        before = result_before_training(
            self.method, self.seed, settings, deployed=True, task=self.task
        )
        self.run = RunLoop(before, read_theta(initial, layout), ModelStructure(layout), files)
        return self.run

    def _play_round(
        self, run: RunLoop, grid: Grid, seconds: float, evaluate_fn: Evaluate | None
    ) -> RoundRecord:
        """One round: ask, collect, aggregate, evaluate, record."""
        number, arrays = run.next_round, self._arrays(run.snapshot.theta)
        with closing_on_error(run):
            messages = list(self.configure_train(number, arrays, ConfigRecord(), grid))
        self._ask_to_declare(run, grid, seconds)
        replies = self._replies(grid, messages, seconds)
        step = self._aggregate(run, number, replies)
        record = self._evaluate(step, grid, seconds, evaluate_fn)
        run.save(step.snapshot, record)
        return record

    def _evaluate(
        self, step: ServerStep, grid: Grid, seconds: float, evaluate_fn: Evaluate | None
    ) -> RoundRecord:
        """The round's record with the metrics on public records and the sites' noised scores.

        Sites are asked only if the round changed the model, because an answer costs them budget.
        """
        record = step.record()
        ask_sites = step.answer is not None and self._asks_for_accuracy(record.round)
        if evaluate_fn is None and not ask_sites:
            return record
        number, arrays = record.round, self._arrays(step.snapshot.released)
        if evaluate_fn is not None:
            record = with_public_scores(record, self.task, evaluate_fn(number, arrays))
        if ask_sites:
            questions = list(self.configure_evaluate(number, arrays, ConfigRecord(), grid))
            replies = self._replies(grid, questions, seconds)
            accuracies = collect_accuracies(replies, number, self.bad_replies)
            record = replace(record, noised_accuracy=accuracies)
        return record

    # ------------------------------------------------------------ Flower's five methods

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The same instruction for every chosen client: round, learning rate, parameters."""
        if self.run is None:
            if self._auto:
                allowed = "requires start(), which knows the number of rounds; give a number"
                raise InvalidValueError("learning_rate", AUTO, allowed)
            self._begin(arrays, server_round)
        nodes = self._choose(grid, server_round)
        rate = self.learning_rate * self.method.rate_factor(server_round)
        fields = ConfigRecord({ROUND: server_round, LEARNING_RATE: rate})
        content = RecordDict({ARRAYS: arrays, CONFIG: fields})
        self._asked = {
            node: Message(content, node, MessageType.TRAIN, group_id=str(server_round))
            for node in nodes
        }
        return list(self._asked.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate and record a round; None leaves the model as it was."""
        if self.run is None:
            raise InvalidValueError(
                "round", server_round, "has not begun: call configure_train first"
            )
        step = self._aggregate(self.run, server_round, senders(self._asked, replies))
        self.run.save(step.snapshot, step.record())
        return None if step.answer is None else self._arrays(step.snapshot.theta), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The same question for all clients of the round, if it is time to ask."""
        if not self._asks_for_accuracy(server_round):
            return []
        fields = ConfigRecord({ROUND: server_round})
        content = RecordDict({ARRAYS: arrays, CONFIG: fields})
        self._questions = {
            node: Message(content, node, MessageType.EVALUATE, group_id=str(server_round))
            for node in self.bad_replies.allowed(MessageType.EVALUATE, self._asked)
        }
        return list(self._questions.values())

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the valid noised scores; None if there is none."""
        sent = senders(self._questions, replies)
        accuracies = list(collect_accuracies(sent, server_round, self.bad_replies).values())
        if not accuracies:
            return None
        return MetricRecord({NOISED_ACCURACY: sum(accuracies) / len(accuracies)})

    def summary(self) -> None:
        """Log one line about the run, and a warning if the method has no noise floor."""
        needs = ", ".join(sorted(n.value for n in self.method.aggregator.needs)) or "nothing"
        _log.info(
            "%s, which needs to know %s; at least %d clients; learning rate %g; results in %s",
            self.method.name,
            needs,
            self.min_clients,
            self.learning_rate,
            self.folder or "memory",
        )
        if self.method.can_be_guarded and self.method.guard is None:
            _log.warning(
                "%s runs WITHOUT A NOISE FLOOR: one site that sends an update without noise gets "
                "all the weight and decides the model, and so do two sites that send the same "
                "update. Compute a floor with `noisewise flower floor` and set noise-floor in the "
                "app's config, or give NoiseAware a method that is guarded(floor, attackers)",
                self.method.name,
            )

    # ------------------------------------------------------------ the parts of a round

    def _choose(self, grid: Grid, number: int) -> list[int]:
        """A random share of the connected nodes; waits for ``min_clients`` up to a time limit."""
        deadline = time.monotonic() + self.wait_seconds
        while len(nodes := self._connected(grid)) < self.min_clients:
            if time.monotonic() > deadline:
                excluded = len(self.bad_replies.excluded(MessageType.TRAIN))
                raise UpdateError(
                    f"{len(nodes)} of at least {self.min_clients} clients connected within "
                    f"{self.wait_seconds:g} s"
                    + (f", not counting {excluded} that sent unusable replies" if excluded else "")
                )
            time.sleep(min(self.poll_seconds, 1.0))
        count = max(self.min_clients, math.ceil(self.participation * len(nodes)))
        if count >= len(nodes):
            return nodes
        generator = keyed_generator(self.seed, number, "participation")
        return sorted(int(n) for n in generator.choice(nodes, size=count, replace=False))

    def _connected(self, grid: Grid) -> list[int]:
        """The connected nodes that may be asked to train, in order."""
        return self.bad_replies.allowed(MessageType.TRAIN, sorted(grid.get_node_ids()))

    def _replies(self, grid: Grid, messages: list[Message], seconds: float) -> Replies:
        """Send messages and fetch the replies until all have arrived or the time is up."""
        assert self._layout is not None
        return fetch_replies(
            grid,
            messages,
            seconds,
            poll_seconds=self.poll_seconds,
            reply_bytes=4 * self._layout.size,
        )

    def _arrays(self, theta: Tensor) -> ArrayRecord:
        assert self._layout is not None
        return to_record(self._layout, theta)

    def _ask_to_declare(self, run: RunLoop, grid: Grid, seconds: float) -> None:
        """Ask the round's nodes that were not asked before and have no stored declaration."""
        new = [node for node in self._asked if node not in self._asked_to_declare]
        nodes = [node for node in new if str(node) not in run.declarations]
        if not nodes or not self.declaration_seconds:
            return
        self._asked_to_declare.update(nodes)
        questions = declaration_questions(nodes)
        replies = self._replies(grid, questions, min(self.declaration_seconds, seconds))
        run.declare(read_declarations(replies, nodes))

    def _aggregate(self, run: RunLoop, number: int, replies: Replies) -> ServerStep:
        """Collect the updates of a round on disk, then aggregate them."""
        assert self._layout is not None
        open_round = OpenRound(number, self._layout, run.snapshot.theta, self.method.normalise)
        with Spool(None if self.folder is None else self.folder / "incoming") as spool:
            absent = collect_updates(replies, self._asked, open_round, spool, self.bad_replies)
            return self._rules.aggregate(run.snapshot, spool, absent)

    def _asks_for_accuracy(self, number: int) -> bool:
        return self.evaluate_every > 0 and number % self.evaluate_every == 0


def _as_method(method: Method | Aggregator | str) -> Method:
    if isinstance(method, str):
        return make_method(method)
    if isinstance(method, Method):
        return method
    if isinstance(method, Aggregator):
        return Method(type(method).__name__, method)
    raise InvalidValueError("method", type(method).__name__, "must be a method or an aggregator")


def _as_task(task: object) -> Task:
    if not isinstance(task, Task):
        allowed = "must be a Task: noisewise.training.tasks.make_task makes one from a name"
        raise InvalidValueError("task", task, allowed)
    return task


def _by_client(disclosed: object) -> Disclosed:
    """The values by client id instead of node id."""
    if not isinstance(disclosed, Mapping) or not all(
        isinstance(need, Disclosure) and isinstance(values, Mapping)
        for need, values in disclosed.items()
    ):
        allowed = "must be {Disclosure.EPSILON: {node id: value}} or the like"
        raise InvalidValueError("disclosed", disclosed, allowed)
    return {
        need: {str(node): value for node, value in values.items()}
        for need, values in disclosed.items()
    }
