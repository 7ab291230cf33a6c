"""The site's signature: every changed byte of statement, signature or key is detected."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import Noisewise
from ledger_cases import BUDGET, DATASET, play, reopen

from noisewise.errors import InvalidValueError, LedgerError, MissingExtraError
from noisewise.privacy.ledger import Ledger, Statement
from noisewise.privacy.ledger.signature import (
    check_signature,
    make_keys,
    read_public_key,
    read_signature,
    sign,
)

pytestmark = pytest.mark.extras  # cryptography

TIME = "2026-11-18T12:00:00Z"
TEXT = b"<html>epsilon 2</html>"


@pytest.fixture
def statement(tmp_path: Path) -> Statement:
    Ledger.create(tmp_path / "l.ledger", BUDGET, DATASET)
    with reopen(tmp_path / "l.ledger") as ledger:
        play(ledger, 3)
        return ledger.statement()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_keys(tmp_path / "site.key")
    return tmp_path / "site.key"


def public(key: Path) -> Path:
    return key.with_name(key.name + ".pub")


def flipped(content: bytes) -> list[bytes]:
    """Every byte changed in its lowest and in its case bit, removed, or doubled."""
    changes = []
    for index in range(len(content)):
        before, after = content[:index], content[index + 1 :]
        byte = content[index : index + 1]
        changes += [before + bytes([byte[0] ^ bit]) + after for bit in (1, 32)]
        changes += [before + after, before + byte + byte + after]
    return [change for change in changes if change != content]


def test_a_signature_states_the_statement_and_the_ledgers_head(
    statement: Statement, key: Path
) -> None:
    signed = check_signature(sign(key, TEXT, statement, TIME), read_public_key(public(key)), TEXT)
    assert (signed.head, signed.events) == (statement.head, statement.events)
    assert (signed.ledger_id, signed.signed_at) == (statement.ledger_id, TIME)


def test_every_changed_byte_of_the_signature_is_detected(statement: Statement, key: Path) -> None:
    content, known = sign(key, TEXT, statement, TIME), read_public_key(public(key))
    for change in flipped(content):
        with pytest.raises(LedgerError):
            check_signature(change, known, TEXT)


def test_every_changed_byte_of_the_statement_is_detected(statement: Statement, key: Path) -> None:
    content, known = sign(key, TEXT, statement, TIME), read_public_key(public(key))
    for change in flipped(TEXT):
        with pytest.raises(LedgerError, match="statement was changed"):
            check_signature(content, known, change)


def test_every_changed_byte_of_the_public_key_is_detected(statement: Statement, key: Path) -> None:
    content, file = sign(key, TEXT, statement, TIME), public(key)
    original = file.read_bytes()
    for change in flipped(original):
        file.write_bytes(change)
        with pytest.raises((InvalidValueError, LedgerError)):
            check_signature(content, read_public_key(file), TEXT)


@pytest.mark.parametrize("field", ["head", "ledger_id", "events", "signed_at", "statement_sha256"])
def test_what_is_stated_cannot_be_exchanged(statement: Statement, key: Path, field: str) -> None:
    """A file with another, valid value and the old signature."""
    other = replace(statement, head="0" * 64, ledger_id="0" * 32, events=99)
    old = json.loads(sign(key, TEXT, statement, TIME))
    new = json.loads(sign(key, b"another", other, "2027-01-01T00:00:00Z"))
    forged = (json.dumps({**old, field: new[field]}, indent=1) + "\n").encode()
    assert old[field] != new[field]
    with pytest.raises(LedgerError, match="does not match"):
        read_signature(forged, read_public_key(public(key)))


def test_another_key_does_not_pass(statement: Statement, key: Path, tmp_path: Path) -> None:
    content = sign(key, TEXT, statement, TIME)
    other = read_public_key(make_keys(tmp_path / "other.key"))
    with pytest.raises(LedgerError, match="another key"):
        check_signature(content, other, TEXT)
    fields = json.loads(content)
    fields["public_key"] = other.public_bytes_raw().hex()
    forged = (json.dumps(fields, indent=1) + "\n").encode()
    with pytest.raises(LedgerError, match="does not match"):
        check_signature(forged, other, TEXT)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"{" * 5000, b'{"format": 1}'],
)
def test_hostile_signature_files_are_refused(content: bytes, key: Path) -> None:
    with pytest.raises(LedgerError, match="damaged or was changed"):
        read_signature(content, read_public_key(public(key)))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused(statement: Statement, key: Path, mode: int) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(mode)
    with pytest.raises(InvalidValueError, match="chmod 600"):
        sign(key, TEXT, statement, TIME)


def test_the_private_key_is_0600_under_any_umask_and_never_replaced(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "k")
    finally:
        os.umask(before)
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    content = (tmp_path / "k").read_bytes()
    with pytest.raises(InvalidValueError, match="never replaced"):
        make_keys(tmp_path / "k")
    (tmp_path / "k.pub").unlink()
    with pytest.raises(InvalidValueError, match="never replaced"):
        make_keys(tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == content


def test_wrong_key_files_are_refused(statement: Statement, key: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch(0o600)
    for wrong in (tmp_path / "missing", empty):
        with pytest.raises(InvalidValueError, match="private key"):
            sign(wrong, TEXT, statement, TIME)
        with pytest.raises(InvalidValueError, match="public key"):
            read_public_key(wrong)
    with pytest.raises(InvalidValueError, match="public key"):
        read_public_key(key)


def test_without_the_extra_there_is_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(MissingExtraError, match=r"noisewise\[sign\]"):
        make_keys(tmp_path / "k")


def test_the_commands_sign_and_verify(tmp_path: Path, noisewise: Noisewise) -> None:
    """keygen, export --sign, verify; then a changed page, ledger, signature and key."""
    ledger, page = tmp_path / "l.ledger", tmp_path / "statement.html"
    Ledger.create(ledger, BUDGET, DATASET)
    with reopen(ledger) as book:
        play(book, 2)
    assert noisewise("ledger", "keygen", tmp_path / "site.key")[0] == 0
    signing = ("ledger", "export", ledger, "-o", page, "--sign", tmp_path / "site.key")
    assert noisewise(*signing)[0] == 0
    assert "The site signed this page" in page.read_text()
    signature, known = tmp_path / "statement.html.sig", tmp_path / "site.key.pub"
    check = ("ledger", "verify", "--signature", signature, "--public-key", known)
    code, out, _ = noisewise(*check)
    assert (code, "valid signature" in out, "ledger was not checked" in out) == (0, True, True)
    with reopen(ledger) as book:
        play(book, 1, start=5)
    code, out, _ = noisewise(*check[:2], ledger, *check[2:])
    assert (code, "event 4 of 6" in out) == (0, True)
    _, out, _ = noisewise(*check[:2], ledger, *check[2:], "--json")
    assert (json.loads(out)["ok"], json.loads(out)["signed"]["events"]) == (True, 4)
    for file, expected in ((page, 1), (signature, 1), (known, 2)):
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        code, out, err = noisewise(*check)
        assert code in (1, expected), (file, out, err)
        file.write_bytes(content)
    assert noisewise(*check)[0] == 0


def test_a_rewritten_ledger_does_not_have_the_signed_head(
    tmp_path: Path, noisewise: Noisewise
) -> None:
    ledger, page = tmp_path / "l.ledger", tmp_path / "statement.json"
    Ledger.create(ledger, BUDGET, DATASET)
    with reopen(ledger) as book:
        play(book, 2)
    noisewise("ledger", "keygen", tmp_path / "site.key")
    noisewise("ledger", "export", ledger, "-o", page, "--sign", tmp_path / "site.key")
    check = ("--signature", f"{page}.sig", "--public-key", tmp_path / "site.key.pub")
    for name in ("l.ledger", "l.ledger-witness", "l.ledger-wal", "l.ledger-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    Ledger.create(ledger, BUDGET, DATASET)  # a new history, valid in itself
    with reopen(ledger) as book:
        play(book, 3)
    assert noisewise("ledger", "verify", ledger)[0] == 0
    code, out, _ = noisewise("ledger", "verify", ledger, *check)
    assert (code, "NOT VALID" in out) == (1, True)
    with sqlite3.connect(ledger) as connection:  # one changed byte of the last hash
        connection.execute("DROP TRIGGER events_update")
        connection.execute("UPDATE events SET hash = replace(hash, substr(hash, 1, 1), 'x')")
    assert noisewise("ledger", "verify", ledger, *check)[0] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [((), "LEDGER"), (("--public-key", "k"), "--signature"),
     (("--signature", "s.sig"), "--public-key"),
     (("--signature", "s.sig", "--head", "0" * 16), "--head")],
)  # fmt: skip
def test_incomplete_options_are_one_line(
    options: tuple[str, ...], words: str, noisewise: Noisewise
) -> None:
    code, _, err = noisewise("ledger", "verify", *options)
    assert (code, words in err, err.count("\n")) == (2, True, 1)
