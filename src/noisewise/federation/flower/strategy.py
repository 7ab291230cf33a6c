"""`NoiseAware`: any of our aggregators as a Flower strategy. Transport only, no mathematics.

Replies are read one by one as they come, checked, and put on disk until the round closes; then
`ServerRun` does what a simulation does. Memory: the matrix of the round's updates, 4 p n bytes
(0.9 GB for 11.2 million parameters and 20 clients), plus about a dozen vectors of 4 p bytes.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from noisewise.aggregation.base import Aggregator, Disclosure
from noisewise.aggregation.methods import Method, make_method
from noisewise.aggregation.permitted import is_unguarded
from noisewise.checks import fraction, non_negative_number, positive_int, positive_number
from noisewise.errors import InvalidValueError, UpdateError
from noisewise.federation.checkpoint import alone_in
from noisewise.federation.flower.declaration import declaration_questions, read_declarations
from noisewise.federation.flower.ending import closing_on_error, end_run
from noisewise.federation.flower.failures import MAX_BAD_REPLIES, FailureBook
from noisewise.federation.flower.pulling import fetch_replies, senders
from noisewise.federation.flower.records import layout_of, read_theta, to_record
from noisewise.federation.flower.replies import (
    ARRAYS,
    CONFIG,
    NOISED_ACCURACY,
    Fault,
    NoReplyError,
    read_noised_accuracy,
    read_update,
)
from noisewise.federation.server import with_unforeseen_samples
from noisewise.federation.server_run import ServerRun, Spool, Survey, check_needs
from noisewise.randomness import keyed_generator
from noisewise.training.parameters import ParameterLayout

__all__ = ["NoiseAware"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

_LARGE = 1_000_000
_log = logging.getLogger(__name__)


class NoiseAware(Strategy):  # type: ignore[misc, unused-ignore]
    """A Flower strategy around a method or an aggregator.

    Example::

        strategy = NoiseAware("RobustHDP", learning_rate=0.2, folder="runs/ward")
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=20)

    Args:
        method: a `Method`, the name of one, or an aggregator. One that divides updates by their
            steps (NoiseWise) needs ``server_steps``, and sites that are told so by their people.
        learning_rate: of the clients' local steps; a site takes part if it is within its bounds.
        folder: for checkpoints and results; a folder with a part of the run is gone on with.
        min_clients: wait for so many, and leave the model alone with fewer sound updates.
        participation: share of the connected clients that is asked in a round.
        told: for methods that need epsilons or numbers of records: values by node id.
        round_seconds: a round closes then; who has not answered is left out.
        wait_seconds: how long to wait for ``min_clients`` to connect.
        failures_allowed: so many rounds in a row may leave the model as it was.
        poll_seconds: between questions for replies.
        seed: of the choice of clients.
        declaration_seconds: how long to wait, before a site's first round, for the unit and budget
            that it declares if its people have opted in; the report repeats them as the site's
            claim. At most ``round_seconds``; 0 asks nobody.
        evaluate_every: after so many rounds each, ask the round's clients for a noised accuracy of
            the new model. Sites answer if their people have opted in; it costs them budget. 0 asks
            nobody.
        max_bad_replies: a site that sends so many unusable replies in a row (undecodable, another
            shape, not finite, ...) is not asked again until the server is restarted. A site that
            does not answer, or does not take part, is asked again.

    Raises:
        InvalidValueError: the method needs what no server may know, or what nobody has told.
    """

    def __init__(
        self,
        method: Method | Aggregator | str,
        *,
        learning_rate: float,
        folder: Path | str | None = None,
        min_clients: int = 2,
        participation: float = 1.0,
        told: Mapping[Disclosure, Mapping[int, float]] | None = None,
        round_seconds: float = 3600.0,
        wait_seconds: float = 600.0,
        failures_allowed: int = 2,
        poll_seconds: float = 1.0,
        seed: int = 0,
        evaluate_every: int = 0,
        declaration_seconds: float = 120.0,
        max_bad_replies: int = MAX_BAD_REPLIES,
    ) -> None:
        self.method = with_unforeseen_samples(_as_method(method))
        self._told = {n: {str(k): v for k, v in by.items()} for n, by in (told or {}).items()}
        check_needs(self.method, self._told)
        if self.method.normalise and self.method.server_steps is None:
            raise InvalidValueError(
                "server_steps", None, "must be given: a server does not know the sites' plans"
            )
        self.learning_rate = positive_number("learning_rate", learning_rate)
        self.min_clients = positive_int("min_clients", min_clients)
        self.participation = fraction("participation", participation)
        self.round_seconds = positive_number("round_seconds", round_seconds)
        self.wait_seconds = positive_number("wait_seconds", wait_seconds)
        self.failures_allowed = positive_int("failures_allowed", failures_allowed)
        self.poll_seconds = positive_number("poll_seconds", poll_seconds)
        self.folder = None if folder is None else Path(folder)
        self.seed = seed
        self.evaluate_every = evaluate_every and positive_int("evaluate_every", evaluate_every)
        self.declaration_seconds = non_negative_number("declaration_seconds", declaration_seconds)
        self._asked_to_declare: set[int] = set()
        self.failures = FailureBook(max_bad_replies)
        self.run: ServerRun | None = None
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
            initial_arrays: trainable parameters; a folder with a part of the run knows better.
            num_rounds: in all, those before a restart included.
            timeout: of a round, in place of ``round_seconds``.
            train_config: must be empty: a site takes a round and a learning rate, nothing else.
            evaluate_config: must be empty: a question is a round and parameters, nothing else.
            evaluate_fn: (round, arrays) -> metrics on public records; ``accuracy`` is recorded.

        Raises:
            InvalidValueError: another process plays the run of this folder, or a config is not
                empty.
            NoUpdatesError: no round changed the model. The folder's status is ``no_updates``, and
                it holds no model. Flower marks the run as failed.
            UpdateError: too few clients connected, or too many rounds in a row failed; the same
                call resumes the run.
        """
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            if config:
                raise InvalidValueError(name, sorted(config), "must be empty: sites refuse more")
        seconds = self.round_seconds if timeout is None else positive_number("timeout", timeout)
        with alone_in(self.folder):
            run = self._begin(initial_arrays, num_rounds)
            return self._play(run, grid, seconds, evaluate_fn)

    def _play(
        self, run: ServerRun, grid: Grid, seconds: float, evaluate_fn: Evaluate | None
    ) -> Result:
        assert self._layout is not None
        result = Result()
        result.arrays = to_record(self._layout, run.snapshot.released)
        self.summary()
        failed = 0
        while not run.ended:
            number = run.snapshot.round + 1
            arrays = to_record(self._layout, run.snapshot.theta)
            with closing_on_error(run):
                messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            self._ask_to_declare(grid, run, seconds)
            replies = self._replies(grid, list(messages), seconds)
            survey = self._survey(grid, number, seconds)
            changed, _ = self._close_round(number, replies, evaluate_fn, survey)
            result.arrays = to_record(self._layout, run.snapshot.released)
            self._note(result, number)
            failed = 0 if changed is not None else failed + 1
            if failed > self.failures_allowed and not run.ended:
                break
        end_run(run, failed)
        return result

    def _begin(self, initial: ArrayRecord, rounds: int) -> ServerRun:
        self._layout = layout_of(initial)
        self.run = ServerRun(
            self.method,
            read_theta(initial, self._layout),
            rounds=rounds,
            folder=self.folder,
            told=self._told,
            min_clients=self.min_clients,
            seed=self.seed,
            identity=repr(self._layout),
            settings={
                "learning_rate": self.learning_rate,
                "participation": self.participation,
                "min_clients": self.min_clients,
            },
        )
        return self.run

    def _note(self, result: Result, number: int) -> None:
        assert self.run is not None
        record = self.run.records[-1]
        score = record.mean_accuracy
        if math.isfinite(score):
            result.evaluate_metrics_serverapp[number] = MetricRecord({"accuracy": score})
        told = record.mean_noised_accuracy
        if math.isfinite(told):
            result.evaluate_metrics_clientapp[number] = MetricRecord({NOISED_ACCURACY: told})
        _log.info(
            "round %d: %d updates used, %d not; accuracy on public records %s%s",
            number,
            len(record.used),
            len(record.dropped),
            f"{100 * score:.1f} %" if math.isfinite(score) else "not measured",
            f"; noised accuracy of sites {100 * told:.1f} %" if math.isfinite(told) else "",
        )

    # ------------------------------------------------------------ Flower's five methods

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The same instruction for every chosen client: round, learning rate, parameters."""
        if self.run is None:
            self._begin(arrays, server_round)
        nodes = self._choose(grid, server_round)
        told = ConfigRecord({"server-round": server_round, "learning-rate": self.learning_rate})
        content = RecordDict({ARRAYS: arrays, CONFIG: told})
        self._asked = {
            node: Message(content, node, MessageType.TRAIN, group_id=str(server_round))
            for node in nodes
        }
        return list(self._asked.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close a round; None keeps the old model."""
        return self._close_round(server_round, senders(self._asked, replies), None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The same question for the round's clients, if this is a round to ask in."""
        if not self.evaluate_every or server_round % self.evaluate_every:
            return []
        asked = ConfigRecord({"server-round": server_round})
        content = RecordDict({ARRAYS: arrays, CONFIG: asked})
        self._questions = {
            node: Message(content, node, MessageType.EVALUATE, group_id=str(server_round))
            for node in self.failures.allowed(MessageType.EVALUATE, self._asked)
        }
        return list(self._questions.values())

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the noised accuracies that can be read; None without any."""
        heard = senders(self._questions, replies)
        told = list(self._told_accuracies(server_round, heard).values())
        return MetricRecord({NOISED_ACCURACY: sum(told) / len(told)}) if told else None

    def summary(self) -> None:
        """One line about the run, and a warning if nothing protects it from quiet updates."""
        needs = ", ".join(sorted(n.value for n in self.method.aggregator.needs)) or "nothing"
        _log.info(
            "%s, which needs to be told %s; at least %d clients; learning rate %g; results in %s",
            self.method.name,
            needs,
            self.min_clients,
            self.learning_rate,
            self.folder or "memory",
        )
        if is_unguarded(self.method.aggregator):
            _log.warning(
                "%s runs WITHOUT A NOISE FLOOR: one site that sends an update without noise gets "
                "all the weight and decides the model, and so do two sites that send the same "
                "update. Compute a floor with `noisewise flower floor` and set noise-floor in the "
                "app's config, or give NoiseAware a method that is guarded(floor, attackers)",
                self.method.name,
            )

    # ------------------------------------------------------------ asking and hearing

    def _choose(self, grid: Grid, number: int) -> list[int]:
        """A share of the connected nodes; waits for ``min_clients``, but not for ever."""
        ends = time.monotonic() + self.wait_seconds
        while len(nodes := self._connected(grid)) < self.min_clients:
            if time.monotonic() > ends:
                excluded = len(self.failures.excluded(MessageType.TRAIN))
                raise UpdateError(
                    f"{len(nodes)} of at least {self.min_clients} clients connected within "
                    f"{self.wait_seconds:g} s"
                    + (f", besides {excluded} that sent unusable replies" if excluded else "")
                )
            time.sleep(min(self.poll_seconds, 1.0))
        asked = max(self.min_clients, math.ceil(self.participation * len(nodes)))
        if asked >= len(nodes):
            return nodes
        generator = keyed_generator(self.seed, number, "participation")
        return sorted(int(n) for n in generator.choice(nodes, size=asked, replace=False))

    def _connected(self, grid: Grid) -> list[int]:
        """The connected nodes that may be asked to train, in order."""
        return self.failures.allowed(MessageType.TRAIN, sorted(grid.get_node_ids()))

    def _replies(
        self, grid: Grid, messages: list[Message], seconds: float
    ) -> Iterable[tuple[int, Message | Fault]]:
        """(node, reply or what was wrong with it), one at a time, until all came or time is up."""
        assert self._layout is not None
        return fetch_replies(
            grid,
            messages,
            seconds,
            poll_seconds=self.poll_seconds,
            reply_bytes=4 * self._layout.size,
        )

    def _ask_to_declare(self, grid: Grid, run: ServerRun, seconds: float) -> None:
        """Ask the round's nodes that were never asked, and whose declaration is not stored."""
        new = [node for node in self._asked if node not in self._asked_to_declare]
        nodes = [node for node in new if str(node) not in run.declarations]
        if not nodes or not self.declaration_seconds:
            return
        self._asked_to_declare.update(nodes)
        questions = declaration_questions(nodes)
        replies = self._replies(grid, questions, min(self.declaration_seconds, seconds))
        run.note_declarations(read_declarations(replies, nodes))

    def _close_round(
        self,
        number: int,
        replies: Iterable[tuple[int, Message | Fault]],
        evaluate: Evaluate | None,
        survey: Survey | None = None,
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if self.run is None or self._layout is None:
            raise InvalidValueError("round", number, "has not begun: call configure_train first")
        run, layout = self.run, self._layout
        absent = {str(node): f"did not answer in round {number}" for node in self._asked}
        place = None if run.folder is None else run.folder / "incoming"
        with Spool(place) as spool:
            for node, reply in replies:
                client = str(node)
                if client in spool:
                    _log.warning("round %d: client %s answered twice", number, client)
                    continue
                update = self._read(node, reply, number)
                if isinstance(update, str):
                    absent[client] = update
                else:
                    spool.add(client, update)
                    del absent[client]
                del reply, update
                if layout.size > _LARGE:
                    gc.collect()  # Flower's messages hold themselves: 4 p bytes each otherwise
            step = run.play(spool.updates(), absent, self._score(number, evaluate), survey)
        if step.answer is None:
            return None, None
        return to_record(layout, run.snapshot.theta), None

    def _read(self, node: int, reply: Message | Fault, number: int) -> Tensor | str:
        """The update [p] of a reply, or why there is none."""
        assert self._layout is not None
        assert self.run is not None
        theta = self.run.snapshot.theta
        try:
            update = read_update(reply, number, self._layout, theta, self.method.normalise)
        except NoReplyError as error:
            return str(error)
        except UpdateError as error:
            return str(error) + self.failures.bad(MessageType.TRAIN, node)
        self.failures.good(MessageType.TRAIN, node)
        return update

    def _score(self, number: int, evaluate: Evaluate | None) -> Callable[[Tensor], float | None]:
        def score(theta: Tensor) -> float | None:
            assert self._layout is not None
            found = evaluate(number, to_record(self._layout, theta)) if evaluate else None
            value: Any = None if found is None else found.get("accuracy")
            return None if value is None else float(value)

        return score

    def _survey(self, grid: Grid, number: int, seconds: float) -> Survey | None:
        if not self.evaluate_every or number % self.evaluate_every:
            return None

        def survey(theta: Tensor) -> Mapping[str, float]:
            assert self._layout is not None
            arrays = to_record(self._layout, theta)
            messages = list(self.configure_evaluate(number, arrays, ConfigRecord(), grid))
            return self._told_accuracies(number, self._replies(grid, messages, seconds))

        return survey

    def _told_accuracies(
        self, number: int, replies: Iterable[tuple[int, Message | Fault]]
    ) -> dict[str, float]:
        """By client id; a site that sends none, or none that can be read, is left out."""
        told: dict[str, float] = {}
        for node, reply in replies:
            try:
                told.setdefault(str(node), read_noised_accuracy(reply, number))
            except UpdateError as error:
                _log.info("round %d: asked for a noised accuracy, %s %s", number, node, error)
                if not isinstance(error, NoReplyError):
                    self.failures.bad(MessageType.EVALUATE, node)
            else:
                self.failures.good(MessageType.EVALUATE, node)
        return dict(sorted(told.items()))


def _as_method(method: Method | Aggregator | str) -> Method:
    if isinstance(method, str):
        return make_method(method)
    if isinstance(method, Method):
        return method
    if isinstance(method, Aggregator):
        return Method(type(method).__name__, method)
    raise InvalidValueError("method", type(method).__name__, "must be a method or an aggregator")
