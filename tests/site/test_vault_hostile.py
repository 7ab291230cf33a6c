"""A hostile app in the relay's place, under the relay's account: frames, floods, kill -9, disk.

The vault must stay up, the ledger right, and nothing but refusals and noised updates come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vault_accounts import (
    ENVIRONMENT,
    ROUND,
    Account,
    VaultSite,
    another_account,
    two_accounts,
    vault_site,
)

from noisewise.privacy.ledger import verify_ledger

pytestmark = [pytest.mark.accounts]


@pytest.fixture(scope="module")
def accounts() -> Iterator[tuple[Account, Account]]:
    with two_accounts() as made:
        yield made


@pytest.fixture(scope="module")
def site(accounts: tuple[Account, Account]) -> Iterator[VaultSite]:
    """A vault with short deadlines; the tests of this file share it."""
    with vault_site(*accounts, frame=1.0, wait=5.0, grid=0.01) as made:
        yield made


def sound(site: VaultSite, charged: int) -> None:
    """The ledger is valid, within its budget, and has exactly so many entries."""
    statement = site.statement()
    assert len(statement.entries) == charged
    assert statement.spent <= statement.epsilon
    assert verify_ledger(site.ledger).problems == ()


# A thousand frames: valid ones with changed bytes, sizes, fields, values and arrays.
CRAFTED = """
import json, random, socket, struct, sys
import numpy as np
from noisewise.site.frames import frame_start
from noisewise.site.tensor_bytes import pack_arrays
path, count = sys.argv[1], int(sys.argv[2])
rng = random.Random(7)
good = {"1.weight": np.zeros((10, 64), np.float32), "1.bias": np.zeros(10, np.float32)}
def payload():
    kind = rng.randrange(9)
    arrays = dict(good)
    if kind == 0: arrays["1.bias"] = np.full(10, rng.choice([np.nan, np.inf, -np.inf]), np.float32)
    if kind == 1: arrays["1.bias"] = np.zeros(rng.choice([0, 1, 11, 1000]), np.float32)
    if kind == 2: arrays.pop("1.bias")
    if kind == 3: arrays["../../site.ledger"] = np.zeros(3, np.float32)
    if kind == 4: arrays = {}
    data = b"".join(pack_arrays(arrays))
    if kind == 5: data = b"\\x80\\x04\\x95" + data[3:]
    if kind == 6: data = data[: rng.randrange(len(data))]
    if kind == 7: data += bytes(rng.randrange(1, 99))
    if kind == 8:
        data = bytearray(data)
        for _ in range(5): data[rng.randrange(600)] = rng.randrange(256)
        if bytes(data) == b"".join(pack_arrays(good)): data[9] ^= 1
        data = bytes(data)
    return data
values = [0, -1, 2**31, 2**80, 1.5, 1e308, -0.0, True, "1", "x" * 3000, "\\u0000"]
def frame():
    data = payload()
    header = {"kind": rng.choice(["train", "train", "train", "evaluate", "declare", "shell", ""]),
              "round": rng.choice([1, 1, *values]),
              "learning_rate": rng.choice([0.2, 0.2, *values])}
    for name in list(header):
        if rng.random() < 0.1: header.pop(name)
    if rng.random() < 0.2: header[rng.choice(["epsilon", "path", "noise_multiplier"])] = 0
    start = bytearray(frame_start(header, len(data)))
    how = rng.randrange(6)
    if how == 0: start[rng.randrange(len(start))] = rng.randrange(256)
    if how == 1: struct.pack_into(">Q", start, 12, rng.choice([0, 1, 10, 2**40, 2**63]))
    if how == 2: struct.pack_into(">I", start, 8, rng.choice([0, 1, 5000, 2**31]))
    return bytes(start) + data
answers = {}
for _ in range(count):
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(30)
    one.connect(path)
    reply = b""
    try:
        one.sendall(frame())
        one.shutdown(socket.SHUT_WR)
        while piece := one.recv(65536): reply += piece
    except OSError:
        pass
    one.close()
    kind = "closed" if not reply else json.loads(reply[20:].split(b"}")[0] + b"}")["kind"]
    if kind == "declared" or len(reply) > 200: kind = f"LEAK {len(reply)}"
    answers[kind] = answers.get(kind, 0) + 1
print(json.dumps(answers))
"""


def test_a_thousand_crafted_frames_get_refusals_and_cost_nothing(site: VaultSite) -> None:
    before = len(site.statement().entries)
    site.still_works(1)  # power: the same bytes without a fault are trained and charged
    assert len(site.statement().entries) == before + 1
    answers = site.relay.python(CRAFTED, str(site.socket), "1000", seconds=300)
    assert sum(answers.values()) == 1000
    assert set(answers) <= {"refused", "closed"}, answers
    assert answers["refused"] > 500
    assert site.alive()
    sound(site, before + 1)
    site.still_works(2)


FLOOD = """
import json, socket, sys, time
path, mode, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
most = int(sys.argv[4]) if len(sys.argv) > 4 else 200
from noisewise.site.frames import frame_start
start = frame_start({"kind": "train", "round": 9, "learning_rate": 0.2}, 2700)
held, made, ends = [], 0, time.monotonic() + seconds
while time.monotonic() < ends:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(1)
    try:
        one.connect(path)
        made += 1
        one.sendall({"silent": b"", "half": start + b"x" * 99, "rubbish": b"x" * 4096}[mode])
    except OSError:
        one.close()
        continue
    held.append(one)
    if mode == "rubbish" or len(held) > most:
        held.pop(0).close()
print(json.dumps(made))
"""

SLOW = """
import json, socket, sys, time
from noisewise.site.frames import frame_start
one = socket.socket(socket.AF_UNIX)
one.connect(sys.argv[1])
frame = frame_start({"kind": "train", "round": 9, "learning_rate": 0.2}, 2700) + b"x" * 2700
position = 0
try:
    while position < len(frame):
        one.sendall(frame[position : position + 20])
        position += 20
        time.sleep(0.1)
except OSError:
    pass
print(json.dumps(position / len(frame)))
"""


@pytest.mark.parametrize("mode", ["silent", "half", "rubbish"])
def test_floods_end_by_their_deadlines(site: VaultSite, mode: str) -> None:
    before = len(site.statement().entries)
    made = site.relay.python(FLOOD, str(site.socket), mode, "5")
    assert made > 50
    assert site.alive()
    time.sleep(6)  # the longest deadline
    sound(site, before)
    assert len(list(Path(f"/proc/{site.pid}/task").iterdir())) < 20  # threads
    site.still_works(10 + len(mode))
    assert len(site.log()) < 200_000


def test_a_slow_frame_is_cut_off(site: VaultSite) -> None:
    before = len(site.statement().entries)
    sent = site.relay.python(SLOW, str(site.socket))
    assert sent < 1  # it wanted 14 s
    sound(site, before)
    site.still_works(20)


# Reads one frame after the other, without deadlines or bounds, and logs every bad one.
UNPROTECTED = """
import os, socket, sys
from pathlib import Path
from noisewise.site.frames import FrameError, frame_start, read_head, read_payload
path = sys.argv[1]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
os.chmod(path, 0o666)
listener.listen(20)
while True:
    one, _ = listener.accept()
    def receive(buffer):
        while buffer:
            count = one.recv_into(buffer)
            if not count:
                raise OSError("half a frame")
            buffer = buffer[count:]
    try:
        read_payload(receive, read_head(receive, 10_000))
        one.sendall(frame_start({"kind": "refused"}, 0))
    except (OSError, FrameError) as error:
        print("a frame was refused:", error, flush=True)
    one.close()
"""

HONEST = """
import json, socket, sys
from noisewise.site.frames import frame_start
one = socket.socket(socket.AF_UNIX)
one.settimeout(float(sys.argv[2]))
try:
    one.connect(sys.argv[1])
    one.sendall(frame_start({"kind": "train", "round": 9, "learning_rate": 0.2}, 8) + b"x" * 8)
    print(json.dumps(len(one.recv(100)) > 0))
except OSError:
    print(json.dumps(False))
"""


@pytest.mark.parametrize("mode", ["silent", "half", "rubbish", "slow"])
def test_the_attacks_succeed_against_an_unprotected_server(
    accounts: tuple[Account, Account], mode: str
) -> None:
    relay, vault = accounts
    with vault_site(relay, vault, start=False) as site:
        path, log = site.base / "run" / "plain.sock", site.base / "plain.log"
        with open(log, "wb") as output:
            server = subprocess.Popen(
                vault.command(sys.executable, "-c", UNPROTECTED, str(path)),
                env=ENVIRONMENT, cwd="/", stdout=output, stderr=output,
            )  # fmt: skip
        try:
            ends = time.monotonic() + 120
            while not path.exists() and time.monotonic() < ends:
                time.sleep(0.1)
            assert relay.python(HONEST, str(path), "60") is True
            if mode == "slow":
                assert relay.python(SLOW, str(path)) >= 1  # the whole frame, however long it takes
                return
            attack = subprocess.Popen(
                relay.command(sys.executable, "-c", FLOOD, str(path), mode, "600", "1000000"),
                env=ENVIRONMENT, cwd="/", stdout=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                ends = time.monotonic() + 120
                if mode == "rubbish":  # the log grows with every frame
                    while lines_about_frames(log) < 1000 and time.monotonic() < ends:
                        time.sleep(0.1)
                    assert lines_about_frames(log) >= 1000
                else:  # an honest relay gets no answer
                    while count_open(server.pid) < 2 and time.monotonic() < ends:
                        time.sleep(0.1)
                    assert relay.python(HONEST, str(path), "3") is False
                assert attack.poll() is None
            finally:
                attack.kill()
                attack.wait(60)
        finally:
            server.kill()
            server.wait(60)


def lines_about_frames(log: Path) -> int:
    return log.read_bytes().count(b"a frame was refused")


def count_open(pid: int) -> int:
    """Sockets that a process has open."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return sum(os.readlink(one).startswith("socket:") for one in links)


def test_another_federation_is_served_during_a_flood(accounts: tuple[Account, Account]) -> None:
    """Without separate accounts, one relay would use the other's socket: settings refuse that."""
    relay, vault = accounts
    with (
        another_account("nwextra") as extra,
        vault_site(relay, vault, start=False, frame=2.0, grid=0.01) as site,
    ):
        more = f'\n[[vault.federations]]\nname = "other"\nsocket = "{site.base}/run/other.sock"\n'
        site.file.write_text(site.file.read_text() + more + f'account = "{extra.name}"\n')
        assert site.socket.parent.exists()
        site.start(groups=[relay.gid, extra.gid])  # as SupplementaryGroups of systemd does
        flood = subprocess.Popen(
            relay.command(sys.executable, "-c", FLOOD, str(site.socket), "half", "600"),
            env=ENVIRONMENT, cwd="/", stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            time.sleep(2)
            got = extra.python(ROUND, f"{site.base}/run/other.sock", "1", "0.2")
            assert got is not None, site.log()
            assert flood.poll() is None
        finally:
            flood.kill()
            flood.communicate(timeout=600)
        assert [entry.federation for entry in site.statement().entries] == ["other"]


def test_kill_9_at_random_moments_never_overspends(accounts: tuple[Account, Account]) -> None:
    """Every instruction is delivered until it is answered; the vault is killed meanwhile."""
    rng = random.Random(3)
    with vault_site(*accounts, start=False, rounds=6, epochs=3, grid=0.01) as site:
        asked, answered, kills = 1, {}, 0
        while asked <= 12 and kills < 12:
            site.start()
            relay = subprocess.Popen(
                site.relay.command(sys.executable, "-c", ROUNDS, str(site.socket), str(asked)),
                env=ENVIRONMENT, cwd="/", stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            time.sleep(rng.uniform(0.2, 1.5))
            site.kill()
            kills += 1
            out, _ = relay.communicate(timeout=600)
            for line in out.splitlines():
                number, values = json.loads(line)
                if values is not None:
                    assert answered.setdefault(number, values) == values
                asked = max(asked, number + 1)
            statement = site.statement()
            assert statement.spent <= statement.epsilon
            assert len(statement.entries) <= 6
        assert verify_ledger(site.ledger).problems == ()
        site.start()
        for number, values in answered.items():  # redelivery: the same bytes, no charge
            before = len(site.statement().entries)
            assert site.round(number) == values
            assert len(site.statement().entries) == before
        assert 1 <= len(answered) <= len(site.statement().entries) <= 6
        for number in range(50, 58):
            site.round(number)
        assert len(site.statement().entries) == 6  # all that was promised, and no more
        sound(site, 6)


@pytest.mark.slow
def test_kill_9_with_two_federations_at_once_never_overspends(
    accounts: tuple[Account, Account],
) -> None:
    """Two relays with accounts of their own ask at the same time; the vault is killed meanwhile."""
    rng = random.Random(5)
    relay, vault = accounts
    with (
        another_account("nwextra") as extra,
        vault_site(relay, vault, start=False, rounds=6, epochs=3, grid=0.01) as site,
    ):
        more = f'\n[[vault.federations]]\nname = "other"\nsocket = "{site.base}/run/other.sock"\n'
        site.file.write_text(
            site.file.read_text() + more + f'account = "{extra.name}"\nrounds = 3\n'
        )
        relays = [
            (relay, "ward", str(site.socket)),
            (extra, "other", f"{site.base}/run/other.sock"),
        ]
        asked, answered = {"ward": 1, "other": 1}, {}
        for _ in range(5):
            site.start(groups=[relay.gid, extra.gid])
            running = [
                subprocess.Popen(
                    one.command(sys.executable, "-c", ROUNDS, path, str(asked[name])),
                    env=ENVIRONMENT, cwd="/", stdout=subprocess.PIPE, text=True,
                )
                for one, name, path in relays
            ]  # fmt: skip
            before = len(site.statement().entries)
            ends = time.monotonic() + 60
            while time.monotonic() < ends and before < 6:  # until one of them is being trained
                if len(site.statement().entries) > before:
                    break
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 0.5))
            site.kill()
            for process, (_, name, _) in zip(running, relays, strict=True):
                out, _ = process.communicate(timeout=600)
                for line in out.splitlines():
                    number, values = json.loads(line)
                    if values is not None:
                        assert answered.setdefault((name, number), values) == values
                    asked[name] = max(asked[name], number + 1)
            statement = site.statement()
            assert statement.spent <= statement.epsilon
            assert len(statement.entries) <= 6
        assert verify_ledger(site.ledger).problems == ()
        site.start(groups=[relay.gid, extra.gid])
        charged = site.statement().entries
        for one, name, path in relays:
            for (federation, number), values in answered.items():
                if federation == name:  # redelivery: the same bytes, no charge
                    assert one.python(ROUND, path, str(number), "0.2") == values
        assert site.statement().entries == charged
        for one, _, path in relays:
            for number in range(50, 54):
                one.python(ROUND, path, str(number), "0.2")
        names = sorted(entry.federation for entry in site.statement().entries)
        assert names == ["other"] * 3 + ["ward"] * 3  # all that was promised, and no more
        sound(site, 6)


ROUNDS = """
import json, sys
import numpy as np
from pathlib import Path
from noisewise.errors import VaultError
from noisewise.flower.relay import VaultAnswers
from noisewise.site.requests import Instruction
good = {"1.weight": np.zeros((10, 64), np.float32), "1.bias": np.zeros(10, np.float32)}
for number in range(int(sys.argv[2]), 13):
    try:
        asked = Instruction(number, 0.2, good)
        got = VaultAnswers(Path(sys.argv[1])).update(lambda: asked, number)
    except VaultError:
        break
    values = None if got is None else got["1.weight"].ravel()[:4].tolist()
    print(json.dumps([number, values]), flush=True)
"""


def test_a_relay_that_is_killed_costs_one_round_and_gets_it_again(site: VaultSite) -> None:
    before = len(site.statement().entries)
    relay = subprocess.Popen(
        site.relay.command(sys.executable, "-c", KILLED, str(site.socket)), env=ENVIRONMENT, cwd="/"
    )
    assert relay.wait(300) == -9
    ends = time.monotonic() + 300
    while len(site.statement().entries) == before and time.monotonic() < ends:
        time.sleep(0.1)
    assert site.round(33) is not None  # the stored reply
    sound(site, before + 1)


KILLED = """
import os, socket, sys
import numpy as np
from noisewise.site.frames import frame_start
from noisewise.site.tensor_bytes import pack_arrays
good = {"1.weight": np.zeros((10, 64), np.float32), "1.bias": np.zeros(10, np.float32)}
data = b"".join(pack_arrays(good))
one = socket.socket(socket.AF_UNIX)
one.connect(sys.argv[1])
one.sendall(frame_start({"kind": "train", "round": 33, "learning_rate": 0.2}, len(data)) + data)
os.kill(os.getpid(), 9)
"""


def test_sigterm_sends_the_reply_that_waits_for_the_grid(
    accounts: tuple[Account, Account],
) -> None:
    with vault_site(*accounts, grid=2.0) as site:
        relay = subprocess.Popen(
            site.relay.command(sys.executable, "-c", ROUNDS, str(site.socket), "12"),
            env=ENVIRONMENT, cwd="/", stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        ends = time.monotonic() + 120
        while not site.statement().sealed and time.monotonic() < ends:
            time.sleep(0.02)
        assert site.end() == 0
        out, _ = relay.communicate(timeout=600)
        number, values = json.loads(out)
        assert (number, values is None) == (12, False)
        sound(site, 1)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), open(path, "wb", 0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk_grants_nothing_and_the_vault_stays_up(
    accounts: tuple[Account, Account],
) -> None:
    with vault_site(*accounts, start=False, grid=0.01) as site:
        folder = site.file.parent
        kept = site.base / "kept"
        folder.rename(kept)
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=True)
        try:
            subprocess.run(["cp", "-a", f"{kept}/.", str(folder)], check=True)
            site.own(folder, site.vault, 0o700)
            site.start()
            site.still_works(1)
            before = len(site.statement().entries)
            filler = folder / "filler"
            fill(filler)
            answers = [site.round(number) for number in range(2, 5)]
            assert answers == [None] * 3
            assert site.alive()
            filler.unlink()
            assert len(site.statement().entries) == before
            site.still_works(5)
            sound(site, before + 1)
        finally:
            site.kill()
            subprocess.run(["umount", str(folder)], check=True)
