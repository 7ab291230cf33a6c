"""The relay of a site: requests to a vault's socket, and its replies back. It decides nothing.

It needs neither torch nor Flower, and reads no record, ledger or file of the site. Any code that
runs under the relay's account can do the same: docs/vault.md says what that allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import VaultError
from noisewise.site.frames import OtherVersionError, Value, frame_start, read_head, read_payload
from noisewise.site.requests import Instruction, Question
from noisewise.site.tensor_bytes import pack_arrays, unpack_arrays
from noisewise.site.vault_socket import Connection, connect_to_vault

__all__ = ["VaultAnswers", "vault_status"]

_CONNECT_SECONDS = 10.0
_REPLY_SECONDS = 3600.0
_SLACK = 1 << 20

Arrays = Mapping[str, NDArray[np.float32]]


class VaultAnswers:
    """The answers of a vault, in the form of `noisewise.site.interface`.

    Args:
        socket: path of the vault's socket.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def update(self, read: Callable[[], Instruction], asked_round: object) -> Arrays | None:
        """A noised update, or None if the vault refuses.

        Raises:
            VaultError: the vault cannot be reached; nothing was charged unless it had the request.
        """
        instruction = read()
        fields = {"round": instruction.round, "learning_rate": instruction.learning_rate}
        header, arrays = _ask(self._socket, "train", fields, instruction.parameters)
        return arrays if header["kind"] == "update" else None

    def accuracy(self, read: Callable[[], Question], asked_round: object) -> float | None:
        """A noised score, or None; see `update`."""
        question = read()
        header, _ = _ask(self._socket, "evaluate", {"round": question.round}, question.parameters)
        return float(header["noised_accuracy"]) if header["kind"] == "accuracy" else None

    def declaration(self) -> dict[str, str | float] | None:
        """The fields of a declaration, or None; see `update`."""
        header, _ = _ask(self._socket, "declare", {})
        if header["kind"] != "declared":
            return None
        return {name: value for name, value in header.items() if name != "kind"}


def vault_status(socket: Path) -> dict[str, Value]:
    """What a vault says about itself: no number that depends on records.

    Raises:
        VaultError: it cannot be reached.
    """
    header, _ = _ask(socket, "status", {})
    return {name: value for name, value in header.items() if name != "kind"}


def _ask(
    socket: Path, kind: str, fields: Mapping[str, object], parameters: Arrays | None = None
) -> tuple[Mapping[str, Value], Arrays]:
    """Send one request; return header and arrays of the reply."""
    payload = [] if parameters is None else pack_arrays(parameters)
    size = sum(len(part) for part in payload)
    start = frame_start({"kind": kind, **fields}, size)  # type: ignore[dict-item]
    connection = connect_to_vault(socket, _CONNECT_SECONDS)
    try:
        deadline = time.monotonic() + _REPLY_SECONDS
        try:
            connection.send([start, *payload], deadline)
        except VaultError as error:  # a vault that refuses does not read all of it
            return _reply(connection, size, len(parameters or {}), deadline, error)
        return _reply(connection, size, len(parameters or {}), deadline)
    finally:
        connection.close()


def _reply(
    connection: Connection,
    size: int,
    n_arrays: int,
    deadline: float,
    sending: VaultError | None = None,
) -> tuple[Mapping[str, Value], Arrays]:
    def receive(buffer: memoryview) -> None:
        connection.receive(buffer, deadline)

    try:
        head = read_head(receive, size + _SLACK)
        if not head.payload_size:
            return head.header, {}
        return head.header, unpack_arrays(read_payload(receive, head), n_arrays)
    except OtherVersionError as error:
        raise VaultError(f"the vault has another version: {error}") from None
    except VaultError as error:
        advice = "its log has the reason; it answers only `account` of the federation in [vault]"
        raise VaultError(f"the vault gave no reply: {sending or error}; {advice}") from None
