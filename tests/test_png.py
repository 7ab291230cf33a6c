from __future__ import annotations

import struct
import zlib
from itertools import pairwise

import numpy as np
import pytest

from noisewise.data import png
from noisewise.data.png import decode_png
from noisewise.errors import SourceError

COLOUR = {1: 0, 2: 4, 3: 2, 4: 6}


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def predictor(kind: int, left: int, up: int, corner: int) -> int:
    """The specification's five predictors, one pixel at a time."""
    if kind == 4:
        guess = left + up - corner
        distances = [abs(guess - left), abs(guess - up), abs(guess - corner)]
        return (left, up, corner)[distances.index(min(distances))]
    return (0, left, up, (left + up) // 2)[kind]


def encode(pixels: np.ndarray, filters: list[int], header: tuple | None = None, pieces=3) -> bytes:
    """A PNG of [height, width, channels] with a filter of one's choice for each row."""
    height, width, channels = pixels.shape
    lines = []
    for y, kind in enumerate(filters):
        line = bytearray([kind])
        for x in range(width):
            for c in range(channels):
                left = int(pixels[y, x - 1, c]) if x else 0
                up = int(pixels[y - 1, x, c]) if y else 0
                corner = int(pixels[y - 1, x - 1, c]) if x and y else 0
                line.append((int(pixels[y, x, c]) - predictor(kind, left, up, corner)) % 256)
        lines.append(bytes(line))
    data = zlib.compress(b"".join(lines))
    cuts = np.linspace(0, len(data), pieces + 1).astype(int)
    body = header or (width, height, 8, COLOUR[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", *body))
        + chunk(b"tEXt", b"ignored")
        + b"".join(chunk(b"IDAT", data[a:b]) for a, b in pairwise(cuts))
        + chunk(b"IEND", b"")
    )


def picture(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_each_filter_round_trips(kind: int, channels: int) -> None:
    pixels = picture(7, 5, channels)
    np.testing.assert_array_equal(decode_png(encode(pixels, [kind] * 7)), pixels)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (40, 6), (6, 40), (300, 24)])
def test_any_mix_of_filters_and_shapes(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for seed in range(3):
        pixels = picture(*shape, 3, seed)
        filters = rng.integers(0, 5, shape[0]).tolist()
        np.testing.assert_array_equal(decode_png(encode(pixels, filters)), pixels)


def test_rare_hard_rows_far_apart() -> None:
    """As in the CIFAR pictures: nearly all rows are Sub, with a Paeth row now and then."""
    pixels = picture(300, 16, 3)
    filters = [1] * 300
    for row in (0, 1, 100, 101, 299):
        filters[row] = 4
    filters[200], filters[201] = 3, 2
    np.testing.assert_array_equal(decode_png(encode(pixels, filters)), pixels)


GOOD = encode(picture(4, 4, 3), [0, 1, 3, 4])


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "signature"),
        (b"GIF89a" + GOOD, "signature"),
        (GOOD[:-20], "ends early|checksum"),
        (GOOD[:40], "ends early|checksum"),
        (flipped(GOOD, 60), "checksum"),
        (flipped(GOOD, 20), "checksum"),
        (GOOD[:8] + chunk(b"IEND", b""), "no header"),
        (encode(picture(4, 4, 3), [0] * 4, (4, 4, 16, 2, 0, 0, 0)), "16 bits"),
        (encode(picture(4, 4, 3), [0] * 4, (4, 4, 8, 3, 0, 0, 0)), "colour type 3"),
        (encode(picture(4, 4, 3), [0] * 4, (4, 4, 8, 2, 0, 0, 1)), "interlace 1"),
        (encode(picture(4, 4, 3), [0] * 4, (4, 5, 8, 2, 0, 0, 0)), "belong"),
        (encode(picture(4, 4, 3), [0] * 4, (4, 3, 8, 2, 0, 0, 0)), "belong"),
        (encode(picture(4, 4, 3), [0] * 4, (1 << 20, 1 << 20, 8, 2, 0, 0, 0)), "too large"),
        (encode(picture(4, 4, 3), [0] * 4, (0, 4, 8, 2, 0, 0, 0)), "belong|too large"),
    ],
)
def test_damage_is_an_error_with_words(content: bytes, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        decode_png(content)


def test_bad_filter_and_bad_stream() -> None:
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    for stream, words in [(zlib.compress(b"\x05\x00"), "filter 5"), (b"rubbish", "damaged PNG")]:
        with pytest.raises(SourceError, match=words):
            decode_png(start + chunk(b"IDAT", stream) + chunk(b"IEND", b""))


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = zlib.decompressobj

    class Spy:
        def __init__(self) -> None:
            self.inner = original()

        def decompress(self, data: bytes, limit: int) -> bytes:
            asked.append(limit)
            return self.inner.decompress(data, limit)

    monkeypatch.setattr(png.zlib, "decompressobj", Spy)
    bomb = zlib.compress(bytes(10_000_000))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    with pytest.raises(SourceError, match="belong"):
        decode_png(start + chunk(b"IDAT", bomb) + chunk(b"IEND", b""))
    assert asked == [3]
