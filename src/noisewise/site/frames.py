"""Frames between a relay and a vault: a fixed prefix, a small strict JSON header, a payload.

| part | bytes |
|---|---|
| prefix | 20: ``NWSITE``, version (2), size of header (4) and payload (8), big-endian |
| header | JSON: one object of texts, numbers and true or false, without duplicate names |
| payload | arrays as `tensor_bytes` writes them, or nothing |

Sizes are checked before memory is allocated. Nothing in a frame names a path or code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from noisewise.errors import InvalidValueError

__all__ = [
    "LARGEST_HEADER",
    "VERSION",
    "FrameError",
    "Head",
    "OtherVersionError",
    "Value",
    "frame_start",
    "read_head",
    "read_payload",
    "strict_json",
]

VERSION = 1
"""Version of the frames; a vault and a relay need the same."""

LARGEST_HEADER = 4096
"""Bytes that a header may take."""

Value = str | int | float | bool
Receive = Callable[[memoryview], None]
"""Fills a buffer from a connection, or raises an error."""

_PREFIX = struct.Struct(">6sHIQ")
_MAGIC = b"NWSITE"


class FrameError(InvalidValueError):
    """A frame that is not as this page says."""


class OtherVersionError(FrameError):
    """A frame of another version."""


@dataclass(frozen=True)
class Head:
    """The start of a frame.

    Attributes:
        header: its fields.
        payload_size: how many bytes follow.
    """

    header: Mapping[str, Value]
    payload_size: int


def frame_start(header: Mapping[str, Value], payload_size: int) -> bytes:
    """The bytes of a frame up to its payload."""
    text = json.dumps(dict(header), allow_nan=False).encode()
    return _PREFIX.pack(_MAGIC, VERSION, len(text), payload_size) + text


def read_head(receive: Receive, largest_payload: int) -> Head:
    """Read the start of a frame.

    Args:
        receive: fills a buffer, see `Receive`.
        largest_payload: bytes that a payload may have.

    Raises:
        OtherVersionError: the frame has another version.
        FrameError: it is no frame, or too large.
    """
    magic, version, header_size, payload_size = _PREFIX.unpack(_read(receive, _PREFIX.size))
    if magic != _MAGIC:
        raise FrameError("frame", magic, f"must begin with {_MAGIC!r}")
    if version != VERSION:
        allowed = f"must be {VERSION}: install the same version of noisewise on both sides"
        raise OtherVersionError("frame version", version, allowed)
    if header_size > LARGEST_HEADER:
        raise FrameError("size of the header", header_size, f"must be at most {LARGEST_HEADER}")
    if payload_size > largest_payload:
        raise FrameError("size of the payload", payload_size, f"must be at most {largest_payload}")
    header = strict_json(bytes(_read(receive, header_size)), "header")
    for name, value in header.items():
        if not isinstance(value, Value):
            raise FrameError(f"header.{name[:20]}", type(value).__name__, "must be a single value")
    return Head(header, payload_size)


def read_payload(receive: Receive, head: Head) -> memoryview:
    """Read the payload of a frame whose size was checked."""
    return memoryview(_read(receive, head.payload_size))


def _read(receive: Receive, size: int) -> bytearray:
    buffer = bytearray(size)
    if size:
        receive(memoryview(buffer))
    return buffer


def strict_json(text: bytes, field: str) -> dict[str, Value]:
    """One JSON object without duplicate names, NaN or infinity.

    Raises:
        FrameError: the text is something else.
    """

    def unique(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    def refuse(word: str) -> Value:
        raise ValueError(word)

    try:
        content = json.loads(text.decode("ascii"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise FrameError(field, type(error).__name__, "must be valid JSON") from None
    if not isinstance(content, dict):
        raise FrameError(field, type(content).__name__, "must be a JSON object")
    return content
