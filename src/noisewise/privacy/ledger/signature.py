"""The site's signature over a statement and the ledger's last hash (Ed25519).

The signature is a small JSON file next to the statement. It has the SHA-256 of the statement, the
ledger's name, last hash and number of events, the time and the public key. Files are compared byte
by byte with what this module would write, so every change of a file is detected.

The library `cryptography` is an extra: ``pip install 'noisewise[sign]'``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from noisewise.errors import InvalidValueError, LedgerError, MissingExtraError
from noisewise.privacy.ledger.statement import Statement

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

__all__ = ["Signed", "check_signature", "make_keys", "read_public_key", "read_signature", "sign"]

_FORMAT = "noisewise-statement-signature-1"
_MOST_BYTES = 4096
_FIELDS = {
    "format": re.escape(_FORMAT),
    "statement_sha256": "[0-9a-f]{64}",
    "ledger_id": "[0-9a-f]{32}",
    "head": "[0-9a-f]{64}",
    "events": "[0-9]{1,18}",
    "signed_at": r"[0-9T:.\-]{19,26}Z",
    "public_key": "[0-9a-f]{64}",
    "signature": "[0-9a-f]{128}",
}


@dataclass(frozen=True)
class Signed:
    """What a signature states.

    Attributes:
        statement_sha256: hash of the statement's file.
        ledger_id: random name of the ledger.
        head: the ledger's last hash when the statement was made.
        events: the number of events then.
        signed_at: time in UTC by the site's clock.
        public_key: of the site, in hexadecimal digits.
    """

    statement_sha256: str
    ledger_id: str
    head: str
    events: int
    signed_at: str
    public_key: str

    def message(self) -> bytes:
        """The bytes that are signed."""
        return f"{_FORMAT}\n{json.dumps(asdict(self), sort_keys=True)}".encode()


def make_keys(path: str | Path) -> Path:
    """Create the site's private key, readable by its owner only, and its public key next to it.

    Args:
        path: of the private key; the public key gets the ending ``.pub``.

    Returns:
        The path of the public key.

    Raises:
        InvalidValueError: one of the files exists, or cannot be written.
        MissingExtraError: `cryptography` is not installed.
    """
    ed25519, serialization = _cryptography()
    private = Path(path)
    public = private.with_name(private.name + ".pub")
    key = ed25519.Ed25519PrivateKey.generate()
    content = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    if public.exists():
        raise InvalidValueError("key", str(public), "exists; keys are never replaced")
    _create(private, content, 0o600)
    _create(public, _public_text(key.public_key()), 0o644)
    return public


def sign(key_file: str | Path, text: bytes, statement: Statement, signed_at: str) -> bytes:
    """Sign a statement.

    Args:
        key_file: the site's private key, see `make_keys`.
        text: content of the statement's file.
        statement: of which the file was made.
        signed_at: time in UTC, as ``2026-11-18T12:00:00Z``.

    Returns:
        The content of the signature's file.

    Raises:
        InvalidValueError: the key cannot be read, or other accounts can read it.
        MissingExtraError: `cryptography` is not installed.
    """
    key = _private_key(Path(key_file))
    signed = Signed(
        hashlib.sha256(text).hexdigest(),
        statement.ledger_id,
        statement.head,
        statement.events,
        signed_at,
        key.public_key().public_bytes_raw().hex(),
    )
    return _encode(signed, key.sign(signed.message()))


def read_signature(content: bytes, public_key: Ed25519PublicKey) -> Signed:
    """Check a signature's own bytes and return what it states.

    Args:
        content: of the signature's file.
        public_key: the site's key, from `read_public_key`.

    Raises:
        LedgerError: the file is not a signature, was changed, or is of another key.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        fields = json.loads(content[:_MOST_BYTES])
        if set(fields) != set(_FIELDS):
            raise ValueError("its fields differ")
        for name, pattern in _FIELDS.items():
            if not re.fullmatch(pattern, str(fields[name])):
                raise ValueError(f"{name} is invalid")
        signature = bytes.fromhex(fields.pop("signature"))
        fields.pop("format")
        signed = Signed(**fields)
        if _encode(signed, signature) != content:
            raise ValueError("its bytes differ from what was written")
    except (ValueError, TypeError, RecursionError) as error:
        raise LedgerError(f"the signature file is damaged or was changed: {error}") from error
    if signed.public_key != public_key.public_bytes_raw().hex():
        raise LedgerError("the signature was made with another key than the given public key")
    try:
        public_key.verify(signature, signed.message())
    except InvalidSignature:
        raise LedgerError(
            "the signature does not match: it or what it states was changed"
        ) from None
    return signed


def check_signature(content: bytes, public_key: Ed25519PublicKey, statement: bytes) -> Signed:
    """Check a signature and the statement that it belongs to.

    Args:
        content: of the signature's file.
        public_key: the site's key.
        statement: content of the statement's file.

    Raises:
        LedgerError: the signature, the statement or the key was changed.
    """
    signed = read_signature(content, public_key)
    if hashlib.sha256(statement).hexdigest() != signed.statement_sha256:
        raise LedgerError("the statement was changed after it was signed, or is another statement")
    return signed


def read_public_key(path: str | Path) -> Ed25519PublicKey:
    """Read a site's public key.

    Raises:
        InvalidValueError: the file is missing or not exactly such a key.
        MissingExtraError: `cryptography` is not installed.
    """
    ed25519, serialization = _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        content = Path(path).read_bytes()
        key: Ed25519PublicKey = serialization.load_pem_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        allowed = f"must be the site's public key, a PEM file ({error})"
        raise InvalidValueError("public_key", str(path), allowed) from error
    is_ed25519 = isinstance(key, ed25519.Ed25519PublicKey)
    if not is_ed25519 or _public_text(key) != content:
        allowed = "must be an Ed25519 public key as `noisewise ledger keygen` writes it"
        raise InvalidValueError("public_key", str(path), allowed)
    return key


def _private_key(path: Path) -> Ed25519PrivateKey:
    ed25519, serialization = _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES)
    except OSError as error:
        allowed = f"must be a private key of `noisewise ledger keygen` ({error.strerror})"
        raise InvalidValueError("key", str(path), allowed) from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        allowed = f"must be a file that only its owner can read: chmod 600 {path}"
        raise InvalidValueError("key", str(path), allowed)
    try:
        key: Ed25519PrivateKey = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        allowed = "must be a private key of `noisewise ledger keygen`"
        raise InvalidValueError("key", str(path), allowed) from error
    is_ed25519 = isinstance(key, ed25519.Ed25519PrivateKey)
    if not is_ed25519:
        raise InvalidValueError("key", str(path), "must be an Ed25519 key")
    return key


def _encode(signed: Signed, signature: bytes) -> bytes:
    fields = {"format": _FORMAT, **asdict(signed), "signature": signature.hex()}
    return (json.dumps(fields, indent=1) + "\n").encode()


def _public_text(key: Ed25519PublicKey) -> bytes:
    _, serialization = _cryptography()
    text: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return text


def _create(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    except OSError as error:
        allowed = f"cannot be created ({error.strerror}); keys are never replaced"
        raise InvalidValueError("key", str(path), allowed) from error
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _cryptography() -> tuple[ModuleType, ModuleType]:
    """The modules of Ed25519 and of key files."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        message = "signatures need cryptography: pip install 'noisewise[sign]'"
        raise MissingExtraError(message) from error
    return ed25519, serialization
