"""Train clients that share no model: one run for each client, round by round, and merge them.

The run of a client is an ordinary run with a single client: the same plan, the same randomness,
checkpoints and a model in its own folder. All clients train round 1, then all train round 2, so
the merged record of a round is known when the round ends. The clients are distributed over
processes; the result does not depend on the distribution.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.errors import InvalidValueError, NoisewiseError
from noisewise.federation.checkpoint import RunFolder
from noisewise.federation.executors import Execution, one_thread
from noisewise.federation.prepared import Prepared
from noisewise.federation.results import RunResult, Status
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.stopwatch import Stopwatch
from noisewise.worker_processes import follow_parent

__all__ = ["Play", "Rounds", "client_folder", "train_apart"]

Rounds = Generator[RoundRecord, None, RunResult]
"""A run in progress: yields the record of each round and returns the result."""

Play = Callable[[Prepared, Execution, Path | None, Stopwatch], Rounds]
"""Starts or resumes a run; the path is its folder."""

_Answers = Mapping[str, RoundRecord | RunResult]
"""By client: the record of its next round, or its result after the last round."""


def train_apart(
    prepared: Prepared,
    before: RunResult,
    files: RunFolder | None,
    execution: Execution,
    clock: Stopwatch,
    play: Play,
) -> Rounds:
    """Train a model of its own for each client.

    Args:
        prepared: of a method that shares no model.
        before: the result before the first round.
        files: the folder of the run; each client has its own in it (`client_folder`), with its
            model. None keeps everything in memory.
        execution: how many processes train the clients.
        clock: measures the parts of each client's rounds, if this process trains them.
        play: trains the run of one client.

    Yields:
        The record of each round, with all clients.

    Returns:
        The result, with one row of all clients for each round.

    Raises:
        InvalidValueError: the executor is Ray, which trains the clients of one model.
        NoisewiseError: a worker process died.
    """
    if execution.executor == "ray":
        name = prepared.method.name
        allowed = f"must be serial or processes for {name}: every client trains its own model"
        raise InvalidValueError("training.executor", "ray", allowed)
    runs = [_run_of_client(prepared, position) for position in range(len(prepared.clients))]
    folders: list[Path | None] = [None] * len(runs)
    if files is not None:
        folders = [client_folder(files.path, k, run.ids[0]) for k, run in enumerate(runs)]
        files.result_file.unlink(missing_ok=True)
        files.delete_rounds()  # the clients' records are merged again
        files.begin(before.summary())
    merged: list[RoundRecord] = []
    statuses: set[Status] = set()
    last: dict[str, RoundRecord] = {}
    evaluated: dict[str, RoundRecord] = {}
    with _streams(list(zip(runs, folders, strict=True)), execution, clock, play) as streams:
        for parts in itertools.zip_longest(*streams, fillvalue={}):
            answers = {client: answer for part in parts for client, answer in part.items()}
            statuses |= {end.status for end in answers.values() if isinstance(end, RunResult)}
            played = {c: record for c, record in answers.items() if isinstance(record, RoundRecord)}
            if not played:
                continue
            last |= played
            evaluated |= {c: record for c, record in played.items() if record.evaluated}
            merged.append(_merge(prepared.ids, played, last, evaluated))
            if files is not None:
                files.append(merged[-1])
            yield merged[-1]
    status = _status(statuses, len(merged) < prepared.settings.rounds)
    result = replace(before, status=status, rounds=tuple(merged))
    if files is not None:
        files.finish(result.summary(), None)
    return result


def client_folder(run: Path, position: int, client: str) -> Path:
    """The folder of a client's run in the folder of the whole run.

    Args:
        run: folder of the whole run.
        position: of the client, from 0.
        client: its id.
    """
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", client).strip("-.")[:40]
    return run / "clients" / f"{position + 1:03d}-{name}"


def _run_of_client(prepared: Prepared, position: int) -> Prepared:
    """The run of one client. It ends when the client's plan does, and is evaluated then."""
    plan, method = prepared.plans[position], prepared.method
    rounds = min(prepared.settings.rounds, plan.rounds)
    auto = None if method.auto is None else replace(method.auto, rounds=rounds)
    return replace(
        prepared,
        clients=(prepared.clients[position],),
        plans=(plan,),
        reference_plans=(prepared.reference_plans[position],),
        method=replace(method, auto=auto, shares_model=True),
        settings=replace(prepared.settings, rounds=rounds),
    )


def _merge(
    ids: Sequence[str],
    played: Mapping[str, RoundRecord],
    last: Mapping[str, RoundRecord],
    evaluated: Mapping[str, RoundRecord],
) -> RoundRecord:
    """One record for all clients; a client whose run has ended keeps its last values.

    Args:
        ids: all clients, in order.
        played: records of this round, of the clients that played it.
        last: the last record of each client.
        evaluated: the last evaluated record of each client that has one.
    """
    present = {client: played[client] for client in ids if client in played}
    changed = {client: record for client, record in present.items() if record.changed}
    # A client whose plan ends earlier is also evaluated then; that is no evaluation of all.
    due = bool(changed) and all(client.evaluated for client in changed.values())
    scored = {client: evaluated.get(client, last[client]) for client in ids}
    return RoundRecord(
        round=next(iter(played.values())).round,
        weights=dict.fromkeys(changed, 1.0),
        dropped={c: reason for r in present.values() for c, reason in r.dropped.items()},
        drop_kinds={c: kind for r in present.values() for c, kind in r.drop_kinds.items()},
        noise_estimate=None,
        noise_converged=None,
        true_noise={c: noise for r in present.values() for c, noise in r.true_noise.items()},
        epsilon_spent={client: last[client].epsilon_spent[client] for client in ids},
        train_loss=_scores({c: r.train_loss for c, r in scored.items()}) if due else None,
        **(_metrics(scored) if due else {}),
    )


def _metrics(scored: Mapping[str, RoundRecord]) -> dict[str, Any]:
    """Metrics of each client's own model; without a common model, clients combine by the mean."""
    names = {name for record in scored.values() for name in record.metrics or {}}
    counts = [r.confusion for r in scored.values() if r.confusion is not None]
    has_accuracy = any(record.accuracy is not None for record in scored.values())
    return {
        "accuracy": _scores({c: r.accuracy for c, r in scored.items()}) if has_accuracy else None,
        "metrics": {
            name: _scores({c: r.by_client(name) or None for c, r in scored.items()})
            for name in sorted(names)
        }
        or None,
        "confusion": np.sum(counts, axis=0).tolist() if len(counts) == len(scored) else None,
    }


def _scores(by_run: Mapping[str, Mapping[str, float] | None]) -> dict[str, float]:
    """The score of each client in its own run; NaN for a client that was never evaluated."""
    return {c: math.nan if scores is None else scores[c] for c, scores in by_run.items()}


def _status(statuses: set[Status], ended_early: bool) -> Status:
    """The status of the whole run: one diverged client makes it diverge."""
    if "diverged" in statuses:
        return "diverged"
    if statuses == {"no_updates"}:
        return "no_updates"
    return "budgets_spent" if ended_early else "finished"


@contextmanager
def _streams(
    runs: Sequence[tuple[Prepared, Path | None]],
    execution: Execution,
    clock: Stopwatch,
    play: Play,
) -> Iterator[list[Iterator[_Answers]]]:
    """Start the clients' runs in this process, or in several: one stream of answers for each."""
    workers = min(execution.workers, len(runs))
    several = workers > 1 and execution.executor in (None, "processes")
    if not several or runs[0][0].settings.device != "cpu":
        own = execution if callable(execution.executor) else Execution()
        with closing(_in_step(runs, own, clock, play)) as stream:
            yield [stream]
        return
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    # The longest runs first, dealt in turn, so that the workers end at about the same time.
    order = sorted(runs, key=lambda run: -run[0].plans[0].steps_per_round)
    with ExitStack() as stack:
        receivers = []
        for number in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(sender, order[number::workers], play), daemon=True
            )
            process.start()
            sender.close()
            stack.callback(process.join)
            stack.callback(process.terminate)  # before join; checkpoints hold what is done
            receivers.append(receiver)
        yield [_received(receiver) for receiver in receivers]


def _in_step(
    runs: Sequence[tuple[Prepared, Path | None]],
    execution: Execution,
    clock: Stopwatch,
    play: Play,
) -> Generator[_Answers, None, None]:
    """Run several clients round by round."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(_records(play(run, execution, folder, clock))))
            for run, folder in runs
        ]
        ids = [run.ids[0] for run, _ in runs]
        for answers in itertools.zip_longest(*clients):
            named = zip(ids, answers, strict=True)
            yield {client: answer for client, answer in named if answer is not None}


def _records(run: Rounds) -> Generator[RoundRecord | RunResult, None, None]:
    """The records of a client's run, also of one that was finished before, then its result."""
    n_played = 0
    with closing(run):
        while True:
            try:
                record = next(run)
            except StopIteration as end:
                result: RunResult = end.value
                break
            n_played += 1
            yield record
    yield from result.rounds[n_played:]
    yield result


def _work(sender: Connection, runs: Sequence[tuple[Prepared, Path | None]], play: Play) -> None:
    """In a worker: train some clients and send every answer, or the error."""
    follow_parent()
    try:
        with one_thread():
            for answers in _in_step(runs, Execution(), Stopwatch(), play):
                sender.send({client: _portable(answer) for client, answer in answers.items()})
        sender.send(None)
    except NoisewiseError as error:
        sender.send(error)
    except Exception as error:  # in the user's own code; it may not survive the pipe
        sender.send(NoisewiseError(f"{type(error).__name__}: {error}"))


def _portable(answer: RoundRecord | RunResult) -> RoundRecord | RunResult:
    """The answer without its model, which the merged result does not have."""
    return replace(answer, trained=None) if isinstance(answer, RunResult) else answer


def _received(receiver: Connection) -> Iterator[_Answers]:
    """The answers of a worker."""
    while True:
        try:
            message = receiver.recv()
        except (EOFError, OSError) as error:
            raise NoisewiseError(
                "a worker that trained clients of Alone died, probably for lack of memory. Use "
                "fewer workers, and run the same command again to resume"
            ) from error
        if message is None:
            return
        if isinstance(message, Exception):
            raise message
        yield message
