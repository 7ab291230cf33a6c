"""A vault in this process: requests through its socket, turns, deadlines, grid, shares, checks."""

from __future__ import annotations

import logging
import os
import pwd
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from site_cases import METRICS, make_site, protect_persons

from noisewise.errors import InvalidValueError, VaultError
from noisewise.flower.relay import VaultAnswers, vault_status
from noisewise.privacy.ledger import Ledger, Statement, read_refusals
from noisewise.site import vault as vault_module
from noisewise.site import vault_checks
from noisewise.site.frames import frame_start
from noisewise.site.loaded_site import keep_loaded
from noisewise.site.log_limit import CHARGED, LogLimit, lines_of
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_file import Site, load_site
from noisewise.site.tensor_bytes import pack_arrays
from noisewise.site.vault import Door, Vault
from noisewise.site.vault_checks import proc_options, vault_findings
from noisewise.site.vault_config import VaultPart
from noisewise.site.vault_socket import Listener
from noisewise.training.models import make_model

MODEL = make_model("softmax", (1, 8, 8), 10, seed=0)
PARAMETERS = {name: part.detach().numpy() for name, part in MODEL.named_parameters()}


def federation(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "socket": f"/run/{name}.sock", "account": f"relay-{name}", **more}


class Running:
    """A vault for this process's own account, without the checks of `serve_site`."""

    def __init__(self, file: Path, names: tuple[str, ...] = ("ward",), **part: Any) -> None:
        self.file = file
        given = part.pop("federations", [federation(name) for name in names])
        settings = {"reply_grid_seconds": 0.02, "frame_seconds": 2.0, **part}
        self.part = VaultPart.model_validate({"federations": given, **settings})
        site = load_site(file)
        config = site.config.model_copy(update={"vault": self.part})
        object.__setattr__(site, "config", config)
        loaded = keep_loaded(site)
        self.folder = Path(tempfile.mkdtemp(prefix="nwv-", dir="/tmp"))
        self.doors = [
            Door(one.name, Listener(self.socket(one.name), os.getgid(), 0o600), os.getuid())
            for one in self.part.federations
        ]
        self.vault = Vault(loaded, self.part, self.doors)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.vault.run, args=(self.stop,))
        self.thread.start()

    def socket(self, name: str = "ward") -> Path:
        return self.folder / f"{name}.sock"

    def round(self, number: object = 1, rate: object = 0.2, name: str = "ward") -> Any:
        asked = Instruction(number, rate, PARAMETERS)
        return VaultAnswers(self.socket(name)).update(lambda: asked, number)

    def statement(self) -> Statement:
        with Ledger.inspect(self.file.parent / "site.ledger") as ledger:
            return ledger.statement()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(30)
        self.folder.rmdir()  # the sockets are removed


@contextmanager
def running(file: Path, names: tuple[str, ...] = ("ward",), **part: Any) -> Iterator[Running]:
    made = Running(file, names, **part)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site", records=60, rounds=6)


def test_a_round_through_the_socket_is_that_of_the_interface(file: Path) -> None:
    with running(file) as vault:
        first, again, second = vault.round(1), vault.round(1), vault.round(2)
        assert {name: one.shape for name, one in first.items()} == {
            name: one.shape for name, one in PARAMETERS.items()
        }
        assert all(np.array_equal(first[name], again[name]) for name in first)
        assert not np.array_equal(first["1.weight"], second["1.weight"])
        found = [(entry.state, entry.federation) for entry in vault.statement().entries]
        assert found == [("sealed", "ward")] * 2
    with running(file) as vault:  # after a restart, the stored bytes
        assert np.array_equal(vault.round(1)["1.weight"], first["1.weight"])


@pytest.mark.parametrize(
    ("number", "rate"), [(0, 0.2), (1, 5.0), (1, 1), ("1", 0.2), (True, 0.2), (10**30, 0.2)]
)
def test_limits_are_those_of_the_site(file: Path, number: object, rate: object) -> None:
    with running(file) as vault:
        assert vault.round(number, rate) is None
        assert vault.statement().entries == ()
        assert read_refusals(file.parent / "site.ledger")


def test_a_vault_protects_persons(file: Path) -> None:
    with np.load(file.parent / "records.npz") as records:
        arrays = dict(records)
    owners = np.arange(60) // 3 + 0.0
    owners[5] = np.nan  # leaves out this record
    np.savez(file.parent / "records.npz", **arrays, who=owners, test_who=owners,
             test_inputs=arrays["inputs"], test_targets=arrays["targets"])  # fmt: skip
    protect_persons(file, 20, 2)
    text = file.read_text().replace("batch_size = 30", "batch_size = 10")
    text += METRICS.format(noise=5.0, records=20, releases=2)
    file.write_text(text + "\n[declaration]\npublish = true\n")
    with running(file) as vault:
        first, again = vault.round(1), vault.round(1)
        assert all(np.array_equal(first[name], again[name]) for name in first)
        answers = VaultAnswers(vault.socket())
        assert type(answers.accuracy(lambda: Question(1, PARAMETERS), 1)) is float
        assert answers.declaration() == {"unit": "person", "epsilon": 8.0, "delta": 1e-3}
        statement = vault.statement()
    assert statement.unit == "person"
    assert [entry.state for entry in statement.entries] == ["sealed", "sealed"]
    np.savez(file.parent / "records.npz", **arrays)
    with pytest.raises(InvalidValueError, match=r"data\.person.*who"):
        Running(file)  # a vault does not start without the array of persons


def test_accuracy_declaration_and_status(file: Path) -> None:
    question = Question(1, PARAMETERS)
    with running(file) as vault:
        answers = VaultAnswers(vault.socket())
        assert answers.accuracy(lambda: question, 1) is None
        assert answers.declaration() is None
        before = vault_status(vault.socket())
        assert before.pop("answers_evaluation") is False
    text = file.read_text().replace("[model]", 'held_out = "records.npz"\n\n[model]')
    text += METRICS.format(noise=5.0, records=60, releases=2)
    file.write_text(text + "\n[declaration]\npublish = true\n")
    with running(file) as vault:
        answers = VaultAnswers(vault.socket())
        assert type(answers.accuracy(lambda: question, 1)) is float
        assert answers.declaration() == {"unit": "record", "epsilon": 8.0, "delta": 1e-3}
        after = vault_status(vault.socket())
        assert after.pop("answers_evaluation") is True
    assert before.pop("answers_declaration") is False
    assert after.pop("answers_declaration") is True
    assert before == after  # whatever was spent
    assert after["parameters"] == 650


def test_records_stay_loaded_and_a_restart_reads_them_again(file: Path) -> None:
    with running(file) as vault:
        (file.parent / "records.npz").unlink()
        assert vault.round(1) is not None
    with pytest.raises(InvalidValueError):
        Running(file)


def test_shares_are_kept_and_the_rest_is_common(file: Path) -> None:
    given = [federation("a", rounds=2), federation("b"), federation("c")]
    with running(file, federations=given) as vault:
        assert [vault.round(k, name="a") is not None for k in range(1, 5)] == [True] * 2 + [
            False
        ] * 2
        assert vault.round(1, name="a") is not None  # the stored one
        assert [vault.round(k, name="b") is not None for k in range(1, 4)] == [True] * 3
        assert [vault.round(k, name="c") is not None for k in range(1, 4)] == [True, False, False]
        names = [entry.federation for entry in vault.statement().entries]
        assert sorted(names) == ["a", "a", "b", "b", "b", "c"]


def test_parameters_are_parsed_outside_of_the_thread_that_trains(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing: list[threading.Thread] = []
    unpack = vault_module.unpack_arrays

    def noted(payload: memoryview, n_arrays: int) -> Any:
        parsing.append(threading.current_thread())
        return unpack(payload, n_arrays)

    monkeypatch.setattr(vault_module, "unpack_arrays", noted)
    with running(file) as vault:
        assert vault.round(1) is not None
        one = raw(vault.socket())
        one.sendall(frame_start({"kind": "train", "round": 2, "learning_rate": 0.2}, 8) + b"x" * 8)
        assert b'"refused"' in one.recv(1000)
        one.close()
        assert len(parsing) == 2
        assert vault.thread not in parsing
    assert "must be safetensors" in read_refusals(file.parent / "site.ledger")[-1].reason


def test_changed_shares_never_exceed_the_rounds_of_the_site(file: Path) -> None:
    """The limit is 6, the budget allows 12. Each group keeps its own limit when shares move."""
    text = file.read_text().replace("[limits]", "[limits]\nrounds = 6")
    file = make_site(file.parent.with_name("more"), records=60, rounds=12)
    file.write_text(text.replace("planned_rounds = 6", "planned_rounds = 12"))
    spent = [federation("a", rounds=4), federation("b")]
    moved = [federation("a"), federation("b", rounds=5)]
    with running(file, federations=spent) as vault:
        assert [vault.round(k, name="a") is not None for k in range(1, 5)] == [True] * 4
    with running(file, federations=moved) as vault:
        limit = vault.vault._sites["b"].round_limit
        alone = replace(limit, at_most_in_all=100)  # the attack: without the total, 4 + 5 rounds
        assert (alone.at_most, limit.at_most_in_all) == (5, 6)
        assert [vault.round(k, name="b") is not None for k in range(1, 6)] == [True] * 2 + [
            False
        ] * 3
        assert len(vault.statement().entries) == 6
        monkeypatched = property(lambda site: alone)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Site, "round_limit", monkeypatched)
            assert [vault.round(k, name="b") is not None for k in range(3, 6)] == [True] * 3
        assert len(vault.statement().entries) == 9


def test_the_same_instruction_of_two_federations_is_charged_twice(file: Path) -> None:
    with running(file, ("a", "b")) as vault:
        first, second = vault.round(1, name="a"), vault.round(1, name="b")
        assert not np.array_equal(first["1.weight"], second["1.weight"])
        assert len(vault.statement().entries) == 2


def test_many_relays_at_once_get_exactly_the_rounds_of_the_site(file: Path) -> None:
    got: list[object] = []
    with running(file, ("a", "b"), connections=20) as vault:

        def ask(number: int) -> None:
            got.append(vault.round(number + 1, name="ab"[number % 2]))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len([one for one in got if one is not None]) == 6
        assert len(vault.statement().entries) == 6


class Watched:
    """The vault's clock; it notes until when the vault sleeps, without the delay of waking up."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self._now = threading.local()

    def monotonic(self) -> float:
        self._now.value = time.monotonic()
        return float(self._now.value)

    def sleep(self, seconds: float) -> None:
        self.ends.append(self._now.value + seconds)
        time.sleep(seconds)


def test_replies_leave_on_the_grid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, began, taken = Watched(), list[float](), list[float]()
    send = Vault._send

    def noted(self: Vault, connection: Any, reply: Any, start: float) -> None:
        began.append(start)
        send(self, connection, reply, start)

    monkeypatch.setattr(vault_module, "time", clock)
    monkeypatch.setattr(Vault, "_send", noted)
    with running(file, reply_grid_seconds=0.5) as vault:
        for number, rate in [(1, 0.2), (1, 0.2), (1, 9.0)]:  # trained, stored, refused
            start = time.monotonic()
            vault.round(number, rate)
            taken.append(time.monotonic() - start)
    assert min(taken) >= 0.5, taken  # a stored reply and a refusal wait, too
    periods = [(end - start) / 0.5 for start, end in zip(began, clock.ends, strict=True)]
    assert len(periods) == 3
    assert periods == pytest.approx([round(period) for period in periods], abs=1e-6)


def test_a_round_longer_than_the_grid_is_logged_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "longer than reply_grid_seconds"
    for grid, count in ((60.0, 0), (1e-4, 1)):
        caplog.clear()
        with running(file, reply_grid_seconds=grid) as vault:
            for seconds in (0.01, 0.015, 0.03):
                vault.vault._warn_of_grid("ward", seconds)
            assert sum(words in one for one in caplog.messages) == 2 * count  # 0.01 and its double
    caplog.clear()
    with running(file, reply_grid_seconds=1e-4) as vault:
        assert vault.round(1) is not None
    [line] = [one for one in caplog.messages if words in one]
    assert line.startswith("ward: a round took")


def raw(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(20)
    made.connect(str(path))
    return made


def test_half_and_slow_frames_end_by_their_deadline_and_block_no_other(file: Path) -> None:
    start = frame_start({"kind": "train", "round": 1, "learning_rate": 0.2}, 2600)
    pieces = [b"", b"NWSITE", start, start + b"x" * 100]

    def hold(vault: Running) -> list[socket.socket]:
        held = [raw(vault.socket("a")) for _ in pieces]
        for one, piece in zip(held, pieces, strict=True):
            one.sendall(piece)
        return held

    with running(file, ("a", "b"), frame_seconds=600.0) as vault:  # none ends by its deadline
        held = hold(vault)
        assert vault.round(1, name="b") is not None
        for one in held:
            one.close()
    with running(file, ("a", "b"), frame_seconds=1.0) as vault:
        held = hold(vault)
        for one in held:
            assert len(one.recv(1000)) < 100  # closed, at most with a refusal
            one.close()
        assert vault.round(1, name="a") is not None


def test_connections_of_a_federation_are_bounded(file: Path) -> None:
    with running(file, ("a", "b"), connections=3, frame_seconds=1.0) as vault:
        held = [raw(vault.socket("a")) for _ in range(12)]
        time.sleep(0.3)
        closed = []
        for one in held:
            one.settimeout(0.05)
            try:
                closed.append(one.recv(1) == b"")
            except TimeoutError:
                closed.append(False)
        assert closed.count(False) == 3
        assert vault.round(1, name="b") is not None
        time.sleep(1.0)
        assert vault.round(1, name="a") is not None
        for one in held:
            one.close()


def test_a_reader_that_does_not_read_delays_its_own_federation_only(tmp_path: Path) -> None:
    file = make_site(tmp_path / "site", records=60, rounds=6)
    with running(file, ("a", "b"), frame_seconds=1.0) as vault:
        payload = b"x" * 2600
        lazy = raw(vault.socket("a"))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        lazy.sendall(frame_start({"kind": "train", "round": 1, "learning_rate": 0.2}, 2600))
        lazy.sendall(payload)
        assert vault.round(1, name="b") is not None
        assert vault.round(1, name="a") is not None
        lazy.close()


def test_the_end_sends_ready_replies_and_leaves_no_thread(file: Path) -> None:
    """Python aborts a process that ends while another thread runs code of torch."""
    before, got = set(threading.enumerate()), list[Any]()
    with running(file, ("a", "b"), reply_grid_seconds=1.0, frame_seconds=30.0) as vault:
        half = raw(vault.socket("b"))
        half.sendall(frame_start({"kind": "train", "round": 1, "learning_rate": 0.2}, 2600))
        relay = threading.Thread(target=lambda: got.append(vault.round(1, name="a")))
        relay.start()
        ends = time.monotonic() + 30
        while not vault.statement().sealed and time.monotonic() < ends:
            time.sleep(0.01)
        assert relay.is_alive()  # the reply waits for the grid
        vault.stop.set()
        vault.thread.join(20)  # less than the deadline of the half frame
        assert not vault.thread.is_alive()
        assert half.recv(1) == b""
        relay.join(20)
        half.close()
        assert set(threading.enumerate()) == before
    assert got[0] is not None


def test_a_request_that_waits_at_the_end_gets_no_reply_and_costs_nothing(file: Path) -> None:
    with running(file, ("a", "b")) as vault:
        reached, go_on, errors = threading.Event(), threading.Event(), list[VaultError]()

        def job() -> Any:
            reached.set()
            go_on.wait(30)
            return vault_module.REFUSED

        vault.vault._jobs.put((job, Future()))
        assert reached.wait(30)

        def ask() -> None:
            try:
                vault.round(1, name="b")
            except VaultError as error:
                errors.append(error)

        relay = threading.Thread(target=ask)
        relay.start()
        ends = time.monotonic() + 30
        while vault.vault._jobs.empty() and time.monotonic() < ends:
            time.sleep(0.01)
        vault.stop.set()
        go_on.set()
        relay.join(20)
        assert "no reply" in str(errors[0])
        vault.thread.join(20)
        assert vault.statement().entries == ()


def test_a_relay_cannot_pass_descriptors(file: Path) -> None:
    """Closing a descriptor can take as long as its sender wants, beyond every deadline."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    with running(file) as vault:
        before = len(os.listdir("/proc/self/fd"))
        one = raw(vault.socket())
        try:
            refused = socket.send_fds(one, [b"N"], [0] * 200) != 1
        except PermissionError:
            refused = True
        assert refused == (release >= (6, 16))  # older kernels have no option for it
        one.close()
        assert vault.round(1) is not None
        assert len(os.listdir("/proc/self/fd")) <= before


def test_another_user_id_gets_no_answer(file: Path) -> None:
    with running(file) as vault:
        door = vault.doors[0]
        object.__setattr__(door, "peer_uid", os.getuid() + 1)
        with pytest.raises(VaultError, match=r"no reply.*only `account` of the federation"):
            vault.round(1)
        assert vault.statement().entries == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "shell"), ("path", "/etc/passwd"), ("noise_multiplier", 0.0), ("round", None)],
)
def test_other_fields_are_refused(file: Path, field: str, value: Any) -> None:
    header: dict[str, Any] = {"kind": "train", "round": 1, "learning_rate": 0.2, field: value}
    header = {name: one for name, one in header.items() if one is not None}
    with running(file) as vault:
        one = raw(vault.socket())
        one.sendall(frame_start(header, 0))
        assert b'"refused"' in one.recv(1000)
        assert one.recv(1000) == b""
        one.close()
        assert vault.statement().entries == ()


def test_a_relay_says_what_is_wrong(tmp_path: Path) -> None:
    asked = Instruction(1, 0.2, PARAMETERS)
    with pytest.raises(VaultError, match="the vault does not run, or the path is wrong"):
        VaultAnswers(tmp_path / "none.sock").update(lambda: asked, 1)
    dead = Path(tempfile.mkdtemp(prefix="nwv-", dir="/tmp")) / "dead.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(dead))
    listener.close()
    with pytest.raises(VaultError, match="no vault listens there"):
        vault_status(dead)
    dead.unlink()
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(dead))
    other.listen()

    def answer() -> None:
        connection, _ = other.accept()
        connection.recv(1000)
        connection.sendall(b"NWSITE" + (7).to_bytes(2, "big") + bytes(12))
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(VaultError, match=r"another version.*install the same version"):
        vault_status(dead)
    thread.join()
    other.close()
    dead.unlink()
    dead.parent.rmdir()


def test_something_else_at_the_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("records")
    with pytest.raises(InvalidValueError, match="must not exist"):
        Listener(path, os.getgid(), 0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(InvalidValueError, match="must not exist"):
        Listener(link, os.getgid(), 0o600)
    assert path.read_text() == "records"


BAD_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no federation": ({"federations": []}, "at least 1 item"),
    "same socket": (
        {"federations": [federation("a"), federation("b") | {"socket": "/run/a.sock"}]},
        "socket '/run/a.sock' is used twice",
    ),
    "same socket in another spelling": (
        {"federations": [federation("a"), federation("b") | {"socket": "//run/./x//../a.sock"}]},
        "socket '/run/a.sock' is used twice",
    ),
    "same account": (
        {"federations": [federation("a"), federation("b") | {"account": "relay-a"}]},
        "account 'relay-a' is used twice",
    ),
    "a relative socket": ({"federations": [federation("a") | {"socket": "a.sock"}]}, "pattern"),
    "a name with a space": ({"federations": [federation("a b")]}, "pattern"),
    "a socket for all": ({"federations": [federation("a", mode=0o666)]}, "other accounts"),
    "a grid in milliseconds": (
        {"federations": [federation("a")], "reply_grid_seconds": 60_000.0},
        "less than or equal",
    ),
    "a wait that no clock has": (
        {"federations": [federation("a")], "wait_seconds": 1e300},
        "less than or equal to 1800",
    ),
    "a grid of 0": ({"federations": [federation("a")], "reply_grid_seconds": 0.0}, "greater"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_settings_are_named(case: str) -> None:
    part, words = BAD_PARTS[case]
    with pytest.raises(ValueError, match=words):
        VaultPart.model_validate(part)


def test_shares_must_fit(file: Path) -> None:
    text = '\n[vault]\n[[vault.federations]]\nname = "a"\nsocket = "/run/a.sock"\naccount = "x"\n'
    file.write_text(file.read_text() + text + "rounds = 7\n")
    with pytest.raises(InvalidValueError, match=r"vault.federations.rounds = \[7\].*at most 6"):
        load_site(file)


def test_checks_name_each_fault_with_a_remedy(file: Path) -> None:
    """The owners of other accounts are tested with real accounts (`test_vault_accounts`)."""
    folder = file.parent
    text = '\n[vault]\n[[vault.federations]]\nname = "a"\naccount = "nobody-here"\n'
    file.write_text(file.read_text() + text + f'socket = "{folder}/a.sock"\n')
    os.chmod(folder, 0o700)
    os.chmod(folder / "records.npz", 0o644)
    os.chmod(file, 0o666)
    findings = vault_findings(load_site(file), file)
    faults = {one.subject.partition(":")[0]: one for one in findings if one.fault}
    assert "0644" in faults["records"].fault
    assert faults["records"].remedy == f"chmod 0600 {folder / 'records.npz'}"
    assert "writable by all accounts" in faults["site's file"].fault
    assert "does not exist" in faults["relay of a"].fault
    assert all(one.remedy for one in faults.values())
    os.chmod(folder, 0o777)
    os.chmod(folder / "site.ledger", 0o640)
    (folder / "link").symlink_to(folder)
    findings = vault_findings(load_site(folder / "link" / "site.toml"), folder / "link/site.toml")
    faults = {one.subject.partition(":")[0]: one for one in findings if one.fault}
    assert {"folder of the ledger", "ledger", "folder of the socket of a"} <= set(faults)
    assert "symbolic link" in faults["site's file"].fault


def line(text: str, **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text, **fields})


def test_a_flood_does_not_fill_the_log() -> None:
    limit = LogLimit(5)
    records = [line(f"refused {number}") for number in range(1000)]
    passed = [one for one in records if limit.filter(one)]
    assert len(passed) == 5
    assert "left out" in passed[-1].msg


PROC = "22 27 0:21 / /proc rw,relatime - proc proc rw"


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", {}),
        (PROC, {}),
        (f"{PROC},hidepid=invisible", {"hidepid": "invisible"}),
        (f"{PROC},hidepid=invisible\n{PROC}", {}),  # the last one at a path counts
        (f"{PROC},gid=5,hidepid=2", {"gid": "5", "hidepid": "2"}),
        (PROC.replace("/proc rw,", "/x/proc rw,") + ",hidepid=2", {}),
    ],
)
def test_options_of_proc_are_read(line: str, options: dict[str, str]) -> None:
    assert proc_options(line) == options


def test_warnings_are_no_faults(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc without hidepid and a function that reads records: the vault starts."""
    text = '\n[vault]\n[[vault.federations]]\nname = "a"\nsocket = "/run/a.sock"\naccount = "x"\n'
    base = file.read_text() + text
    source = 'function = "site_cases:make_site"'
    file.write_text(base.replace('file = "records.npz"', source))
    monkeypatch.setattr(vault_checks, "proc_options", lambda text: {})
    site = load_site(file)
    found = {one.subject: one for one in vault_findings(site, file) if one.warning}
    assert sorted(found) == ["processes: /proc", "records: data.function = 'site_cases:make_site'"]
    assert "cannot be checked" in found["records: data.function = 'site_cases:make_site'"].warning
    assert not any(one.fault for one in found.values())
    assert all(one.remedy for one in found.values())
    hidden = {"hidepid": "invisible"}
    monkeypatch.setattr(vault_checks, "proc_options", lambda text: hidden)
    monkeypatch.delenv("INVOCATION_ID", raising=False)
    assert not any(one.subject == "processes: /proc" for one in vault_findings(site, file))
    monkeypatch.setenv("INVOCATION_ID", "x")  # systemd: this /proc may not be that of the relays
    assert any(one.subject == "processes: /proc" for one in vault_findings(site, file))
    file.write_text(base.replace("[vault]", "[vault]\nrelays_see_no_processes = true"))
    assert not any(one.warning for one in vault_findings(load_site(file), file))


def test_one_user_id_under_two_names_and_the_overflow_id_are_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real accounts with one user id are in `test_vault_accounts`."""
    text = "\n[vault]\n"
    for name in "abc":
        one = federation(name)
        text += "[[vault.federations]]\n"
        text += "".join(f'{field} = "{value}"\n' for field, value in one.items())
    file.write_text(file.read_text() + text)
    ids = {"relay-a": 7001, "relay-b": 7001, "relay-c": 65534}

    def found(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", ids[name], os.getgid(), "", "/", "/bin/false"))

    monkeypatch.setattr(pwd, "getpwnam", found)
    faults = [(one.subject, one.fault) for one in vault_findings(load_site(file), file)]
    wanted = "has the user id 7001 of relay-a, the relay of a"
    assert ("relay of b: account relay-b", wanted) in faults
    assert any(fault.startswith("has user id 65534") for _, fault in faults)
    ids.update({"relay-b": 7002, "relay-c": 7003})  # power: other ids are accepted
    faults = [(one.subject, one.fault) for one in vault_findings(load_site(file), file)]
    assert not any("user id" in fault for _, fault in faults)


def test_repeated_lines_are_written_at_powers_of_ten() -> None:
    limit = LogLimit(5)
    passed = [one.msg for one in (line("refused") for _ in range(1000)) if limit.filter(one)]
    assert passed == [
        "refused", "refused (10 times in this minute)", "refused (100 times in this minute)",
        "refused (1000 times in this minute)",
    ]  # fmt: skip
    assert limit.filter(line("another line"))


def test_one_flood_hides_no_line_of_others_and_no_charge() -> None:
    limit = LogLimit(5)

    def flood() -> None:
        for number in range(1000):
            limit.filter(line(f"a: refused {number}"))

    flood()
    assert not limit.filter(line("b: refused"))  # power: with one count for all, b is hidden
    with lines_of("a"):
        flood()
        assert not limit.filter(line("a: refused"))
        assert limit.filter(line("round 3 is charged", **CHARGED))
    for source in ("b", "a: foreign accounts"):
        with lines_of(source):
            assert limit.filter(line("a line"))


def test_lines_of_a_vault_are_counted_by_their_federation(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit, log = LogLimit(3), logging.getLogger("noisewise.site")
    with running(file, ("a", "b")) as vault, caplog.at_level("INFO", "noisewise.site"):
        log.addFilter(limit)
        try:
            for number in range(10):
                one = raw(vault.socket("a"))
                one.sendall(frame_start({"kind": f"rubbish {number}"}, 0))
                assert b'"refused"' in one.recv(1000)
                one.close()
            door = vault.doors[0]
            object.__setattr__(door, "peer_uid", os.getuid() + 1)
            with pytest.raises(VaultError):
                vault.round(1, name="a")
            object.__setattr__(door, "peer_uid", os.getuid())
            assert vault.round(9, 50.0, name="b") is None
            assert vault.round(3, name="a") is not None
        finally:
            log.removeFilter(limit)
    lines = caplog.messages
    assert sum("rubbish" in one for one in lines) == 3
    assert any(f"a: user id {os.getuid()} may not use" in one for one in lines)
    assert any("not taking part: learning_rate" in one for one in lines)
    assert any("round 3 is charged" in one for one in lines)


def exchanged(vault: Running, number: int) -> bytes:
    """All bytes of a reply."""
    payload = b"".join(pack_arrays(PARAMETERS))
    header = {"kind": "train", "round": number, "learning_rate": 0.2}
    one = raw(vault.socket())
    one.sendall(frame_start(header, len(payload)) + payload)
    reply = b""
    while piece := one.recv(65536):
        reply += piece
    one.close()
    return reply


def test_one_record_changes_nothing_but_the_noised_values(tmp_path: Path) -> None:
    """Guarantees 1 and 16 through the socket: fewer records, a broken one, or none at all."""
    replies, states = [], []
    for case in ("all", "one less", "one broken", "all broken"):
        file = make_site(tmp_path / case, records=60, rounds=6)
        with np.load(file.parent / "records.npz") as found:
            inputs, targets = found["inputs"].copy(), found["targets"].copy()
        if case == "one less":
            inputs, targets = inputs[:-1], targets[:-1]
        inputs = inputs.astype(np.float32)
        inputs[{"one broken": slice(5, 6), "all broken": slice(None)}.get(case, slice(0, 0))] = (
            np.nan
        )
        np.savez(file.parent / "records.npz", inputs=inputs, targets=targets)
        file.write_text(file.read_text().replace("records = 59", "records = 60"))
        with running(file) as vault:
            replies.append(exchanged(vault, 1))
            states.append(vault_status(vault.socket()))
    size = 4 * sum(one.size for one in PARAMETERS.values())
    assert len({reply[:-size] for reply in replies}) == 1  # prefix, header, names and shapes
    assert len({reply[-size:] for reply in replies}) == 4  # the noise
    assert {len(reply) for reply in replies} == {len(replies[0])}
    assert all(state == states[0] for state in states)
