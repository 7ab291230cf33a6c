"""Stress a ledger with real processes: kill -9 at random moments, and many clients at once.

The script runs in its own process without threads, loads everything once and forks clients:

    python tests/helpers/ledger_torture.py kills FOLDER --kills 1000
    python tests/helpers/ledger_torture.py crowd FOLDER --processes 8 --rounds 300

Each client notes every grant and every reply that it sent in a file outside of the ledger. At the
end the script compares these notes with the ledger. ``--flaw`` plants a bug, which the script must
find.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from noisewise.errors import BudgetSpentError
from noisewise.privacy import PrivacyBudget
from noisewise.privacy.accounting import epsilon_of
from noisewise.privacy.ledger import (
    Charge,
    Ledger,
    Reservation,
    SealedReply,
    instruction_hash,
    verify_ledger,
)

FLAWS = ("charges after training", "returns before sealing", "checks outside of the transaction")
DATASET = "torture"
CHARGE = Charge("training", 1.0, 50.0, 3)
DELTA = 1e-5


def budget_of(rounds: int) -> PrivacyBudget:
    """Return the budget for exactly this number of rounds."""
    args = (CHARGE.sample_rate, CHARGE.noise_multiplier)
    return PrivacyBudget(epsilon_of(*args, rounds * CHARGE.steps, DELTA, "rdp"), DELTA)


def make(path: Path, rounds: int) -> None:
    Ledger.create(path, budget_of(rounds), DATASET, "rdp")


def reserve(ledger: Ledger, instruction: str, flaw: str | None) -> Reservation | SealedReply:
    if flaw == "checks outside of the transaction":
        check, asked = ledger._check_fits, []

        def only_once(charge: Charge) -> None:
            if not asked:
                check(charge)
                time.sleep(0.05)  # longer than the other steps: most other clients check meanwhile
            asked.append(charge)

        ledger._check_fits = only_once  # type: ignore[method-assign]
        try:
            return ledger.reserve(instruction, CHARGE)
        finally:
            ledger._check_fits = check  # type: ignore[method-assign]
    return ledger.reserve(instruction, CHARGE)


def client(path: Path, rounds: int, notes: int, seed: int, flaw: str | None) -> None:
    """Take part until the budget is spent; one in five instructions may be a repetition."""
    rng = random.Random(seed)
    ledger = Ledger.open(path, dataset_id=DATASET, budget=budget_of(rounds))

    def note(*words: object) -> None:
        os.write(notes, (" ".join(map(str, words)) + "\n").encode())

    while True:
        number = rng.randrange(50) if rng.random() < 0.2 else rng.getrandbits(60)
        instruction = instruction_hash(str(number).encode())
        try:
            if flaw == "charges after training":
                ledger._refresh()
                ledger._check_fits(CHARGE)
                note("granted", -rng.getrandbits(60), instruction)
                time.sleep(rng.random() * 0.004)
            granted = reserve(ledger, instruction, flaw)
        except BudgetSpentError:
            note("refused")
            return
        if isinstance(granted, SealedReply):
            note("again", granted.reservation, hashlib.sha256(granted.reply).hexdigest())
            continue
        if flaw != "charges after training":
            note("granted", granted.seq, instruction)
        reply = rng.randbytes(rng.randrange(1, 60_000))
        time.sleep(rng.random() * 0.002)
        if flaw == "returns before sealing":
            note("sent", granted.seq, hashlib.sha256(reply).hexdigest())
            time.sleep(rng.random() * 0.008)
        sent = ledger.seal(granted, reply)
        note("sent", granted.seq, hashlib.sha256(sent).hexdigest())


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        print(f"client: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def wait_for_progress(notes: int, size: int) -> None:
    """Wait until clients have noted ``size`` more bytes, for at most 2 s.

    So kills hit all moments of a round, on a slow disk as well.
    """
    wanted, deadline = os.fstat(notes).st_size + size, time.monotonic() + 2
    while os.fstat(notes).st_size < wanted and time.monotonic() < deadline:
        time.sleep(0.0005)


def kills(path: Path, count: int, rounds: int, seed: int, flaw: str | None) -> list[int]:
    """Kill ``count`` clients, then let one spend the rest of the budget.

    Returns the number of kills and the exit codes of the clients that were not killed.
    """
    rng = random.Random(seed)
    notes = os.open(path.with_name("notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    codes, killed = [], 0
    while killed < count:
        seeds = [rng.getrandbits(60) for _ in range(rng.choice((1, 1, 2)))]
        children = [fork(lambda s=s: client(path, rounds, notes, s, flaw)) for s in seeds]
        wait_for_progress(notes, 80 * rng.randrange(6))
        time.sleep(rng.random() * 0.01)
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            killed += code == -signal.SIGKILL
            codes += [] if code == -signal.SIGKILL else [code]
        if codes and len(codes) > 10:
            break  # the budget is spent, or clients fail
    last = fork(lambda: client(path, rounds, notes, rng.getrandbits(60), flaw))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(last, 0)[1]))
    os.close(notes)
    return [killed, *codes]


def crowd(path: Path, processes: int, rounds: int, seed: int, flaw: str | None) -> list[int]:
    """Run many clients at once until the budget is spent; return their exit codes."""
    notes = os.open(path.with_name("notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    children = [
        fork(lambda k=k: client(path, rounds, notes, seed + k, flaw)) for k in range(processes)
    ]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def judge(path: Path, rounds: int) -> dict[str, object]:
    """Compare the clients' notes with the ledger."""
    notes = [line.split() for line in path.with_name("notes").read_text().splitlines()]
    granted = [int(words[1]) for words in notes if words[0] == "granted"]
    outcome = verify_ledger(path)
    with Ledger.inspect(path) as ledger:
        statement = ledger.statement()
        history = ledger._history
    problems = list(outcome.problems)
    if len(granted) > len(history.reservations):
        problems.append(f"{len(granted)} grants, {len(history.reservations)} charges")
    if len(set(granted)) < len(granted) or not set(granted) <= set(history.reservations):
        problems.append("grants that are not in the ledger")
    for words in notes:
        if words[0] in ("sent", "again"):
            seal = history.seals.get(int(words[1]))
            if seal is None or seal.reply_sha256 != words[2]:
                problems.append(f"reply of reservation {words[1]} was sent but not sealed")
    if len(history.reservations) != rounds:
        problems.append(f"{len(history.reservations)} charges for {rounds} rounds")
    return {
        "granted": len(granted),
        "charged": len(history.reservations),
        "rounds": rounds,
        "sealed": statement.sealed,
        "redelivered": sum(words[0] == "again" for words in notes),
        "overspends": max(0, len(granted) - rounds),
        "epsilon": statement.epsilon,
        "spent": statement.spent,
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("kills", "crowd"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flaw", choices=FLAWS)
    chosen = parser.parse_args()
    logging.getLogger("noisewise").setLevel(logging.ERROR)
    path = chosen.folder / "ledger.sqlite"
    rounds = chosen.rounds or 5 * chosen.kills
    make(path, rounds)
    started = time.monotonic()
    if chosen.kind == "kills":
        killed, *codes = kills(path, chosen.kills, rounds, chosen.seed, chosen.flaw)
    else:
        killed, codes = 0, crowd(path, chosen.processes, rounds, chosen.seed, chosen.flaw)
    answer = {"kills": killed, "failed": sum(code != 0 for code in codes), **judge(path, rounds)}
    print(json.dumps({**answer, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
