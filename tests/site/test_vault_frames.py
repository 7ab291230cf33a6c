"""Frames between relay and vault: what is accepted, and that hostile bytes cost little."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from noisewise.site.frames import (
    LARGEST_HEADER,
    FrameError,
    OtherVersionError,
    frame_start,
    read_head,
    read_payload,
)
from noisewise.site.tensor_bytes import largest_payload, pack_arrays, unpack_arrays

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


class ShortError(Exception):
    """The bytes ended."""


def reader(data: bytes) -> Callable[[memoryview], None]:
    rest = [data]

    def receive(buffer: memoryview) -> None:
        piece, rest[0] = rest[0][: len(buffer)], rest[0][len(buffer) :]
        if len(piece) < len(buffer):
            raise ShortError
        buffer[:] = piece

    return receive


def arrays(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {"1.weight": (3, 5), "1.bias": (5,), "scale": (), "none": (0, 4)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def joined(given: Arrays) -> bytes:
    return b"".join(pack_arrays(given))


def test_a_frame_is_read_as_it_was_written() -> None:
    payload = joined(arrays())
    header = {"kind": "train", "round": 3, "learning_rate": 0.1}
    receive = reader(frame_start(header, len(payload)) + payload)
    head = read_head(receive, 10_000)
    assert head.header == header
    assert bytes(read_payload(receive, head)) == payload


def test_arrays_are_safetensors_in_both_directions() -> None:
    """The reference is the safetensors library."""
    given = arrays()
    found = load(joined(given))
    assert {name: one.tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in given.items()
    }
    back = unpack_arrays(memoryview(save(given)), 4)
    assert set(back) == set(given)
    for name, one in back.items():
        assert one.dtype == np.float32
        assert one.shape == given[name].shape
        assert np.array_equal(one, given[name])


def test_arrays_are_views_and_not_copies() -> None:
    payload = bytearray(joined(arrays()))
    found = unpack_arrays(memoryview(payload), 4)
    payload[-24:] = bytes(24)  # "1.bias" and "scale"
    assert np.array_equal(found["1.bias"], np.zeros(5, np.float32))


def test_other_memory_orders_are_packed_by_rows() -> None:
    given = {"x": np.asfortranarray(arrays()["1.weight"])}
    assert np.array_equal(load(joined(given))["x"], given["x"])


def prefix(magic: bytes = b"NWSITE", version: int = 1, header: int = 2, payload: int = 0) -> bytes:
    return struct.pack(">6sHIQ", magic, version, header, payload)


BAD_FRAMES = {
    "another beginning": prefix(magic=b"GET / ") + b"{}",
    "a header too large": prefix(header=LARGEST_HEADER + 1) + b"{}",
    "a payload too large": prefix(payload=10**18) + b"{}",
    "no JSON": prefix() + b"{]",
    "no object": prefix() + b"[]",
    "not ASCII": prefix() + b"\xff\xff",
    "a name twice": prefix(header=13) + b'{"a":1,"a":2}',
    "NaN": prefix(header=9) + b'{"a":NaN}',
    "infinity": prefix(header=14) + b'{"a":Infinity}',
    "null": prefix(header=10) + b'{"a":null}',
    "a list": prefix(header=8) + b'{"a":[]}',
    "an object": prefix(header=8) + b'{"a":{}}',
    "deep": prefix(header=4000) + b"[" * 4000,
    "a long number": prefix(header=4006) + b'{"a":' + b"9" * 4000 + b"]",
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_bad_frames_are_refused_with_one_short_line(case: str) -> None:
    with pytest.raises(FrameError) as caught:
        read_head(reader(BAD_FRAMES[case]), 1000)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_another_version_is_named() -> None:
    with pytest.raises(OtherVersionError, match="must be 1: install the same version"):
        read_head(reader(prefix(version=2) + b"{}"), 1000)


def tensors(entries: object, values: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + values


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_PAYLOADS = {
    "empty": b"",
    "short": b"1234567",
    "size too large": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": tensors(b"{]"),
    "another type": tensors({"x": entry("F64", [1], [0, 8])}, bytes(8)),
    "pickle": b"\x80\x04\x95" + bytes(50),
    "metadata": tensors({"__metadata__": {"a": "b"}}),
    "more fields": tensors({"x": entry() | {"path": "/etc/passwd"}}, bytes(4)),
    "less fields": tensors({"x": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "shape is a number": tensors({"x": entry(shape=1)}, bytes(4)),
    "negative shape": tensors({"x": entry(shape=[-1, -1])}, bytes(4)),
    "true as a size": tensors({"x": entry(shape=[True])}, bytes(4)),
    "a float as a size": tensors({"x": entry(shape=[1.0])}, bytes(4)),
    "many dimensions": tensors({"x": entry(shape=[1] * 9)}, bytes(4)),
    "huge shape": tensors({"x": entry(shape=[2**39] * 8)}, bytes(4)),
    "huge shape without values": tensors({"x": entry(shape=[0, *[2**39] * 3], offsets=[0, 0])}),
    "offsets beyond": tensors({"x": entry(shape=[2], offsets=[0, 8])}, bytes(4)),
    "offsets overlap": tensors({"x": entry(), "y": entry()}, bytes(8)),
    "a gap": tensors({"x": entry(offsets=[4, 8])}, bytes(8)),
    "rest": tensors({"x": entry()}, bytes(8)),
    "float offsets": tensors({"x": entry(offsets=[0.0, 4.0])}, bytes(4)),
    "a name twice": tensors(b'{"x": {}, "x": {}}'),
}


@pytest.mark.parametrize("case", BAD_PAYLOADS)
def test_bad_payloads_are_refused_with_one_short_line(case: str) -> None:
    with pytest.raises(FrameError) as caught:
        unpack_arrays(memoryview(BAD_PAYLOADS[case]), 4)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_raise_frame_errors_only(data: st.DataObject) -> None:
    payload = joined(arrays())
    frame = bytearray(frame_start({"kind": "train", "round": 1}, len(payload)) + payload)
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    receive = reader(bytes(frame))
    try:
        head = read_head(receive, 4096)
        unpack_arrays(read_payload(receive, head), 4)
    except (FrameError, ShortError):
        pass


def test_the_largest_payload_has_room_for_any_names() -> None:
    names = {f"layer.{number}.{'x' * 200}": np.zeros(3, np.float32) for number in range(50)}
    assert len(joined(names)) <= largest_payload(50, 150)


def peak_of_parsing(payload: bytes, n_arrays: int) -> tuple[float, str]:
    """Peak memory in bytes for each byte of a payload that is refused, and the refusal."""
    tracemalloc.start()
    try:
        with pytest.raises(FrameError) as caught:
            unpack_arrays(memoryview(payload), n_arrays)
        return tracemalloc.get_traced_memory()[1] / len(payload), str(caught.value)
    finally:
        tracemalloc.stop()


def test_a_header_of_arrays_cannot_fill_the_payload() -> None:
    """Parsed JSON takes many times its bytes; the bound keeps it small beside the parameters."""
    names = ",".join(f'"{number:x}":[]' for number in range(150_000))
    payload = tensors(f"{{{names}}}".encode())
    most = largest_payload(2, 500_000)
    assert len(payload) < most  # a frame of this size is accepted
    unbounded, _ = peak_of_parsing(payload, len(payload))
    assert unbounded > 10  # the attack: as if the model had so many arrays
    bounded, words = peak_of_parsing(payload, 2)
    assert bounded < 0.1
    assert "header of the arrays" in words
