"""A reader of lossless 8-bit PNG images with nothing but zlib and numpy.

Source: the PNG specification (ISO/IEC 15948), chunks and the five filters. Palettes, 16 bits and
interlacing are refused: no dataset here uses them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import SourceError

__all__ = ["decode_png"]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # colour type -> samples of a pixel
MAX_BYTES = 1 << 28  # of the decoded image; a small file can claim any size


def decode_png(content: bytes) -> NDArray[np.uint8]:
    """Decode a PNG to [height, width, channels].

    Raises:
        SourceError: the bytes are no PNG, are damaged, or use a feature that is not supported.
    """
    if not content.startswith(SIGNATURE):
        raise SourceError("not a PNG image: the signature is missing")
    header: tuple[int, ...] | None = None
    compressed: list[bytes] = []
    for kind, body in _chunks(content):
        if kind == b"IHDR" and len(body) == 13:
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            compressed.append(body)
    if header is None:
        raise SourceError("damaged PNG: it has no header")
    width, height, depth, colour, _, _, interlace = header
    if depth != 8 or colour not in CHANNELS or interlace:
        raise SourceError(
            f"PNG with {depth} bits, colour type {colour}, interlace {interlace}: "
            "only 8-bit grey or RGB images without interlacing can be read"
        )
    row = width * CHANNELS[colour]
    size = height * (1 + row)
    if not 0 < size <= MAX_BYTES:
        raise SourceError(f"PNG of {width} x {height} pixels: too large")
    scanlines = _inflate(b"".join(compressed), size).reshape(height, 1 + row)
    filters = scanlines[:, 0]
    if filters.max() > 4:
        raise SourceError(f"damaged PNG: unknown filter {filters.max()}")
    return _unfilter(filters, scanlines[:, 1:].reshape(height, width, CHANNELS[colour]))


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Type and body of each chunk up to IEND, with its checksum verified."""
    position = len(SIGNATURE)
    while position + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, position)
        body = content[position + 8 : position + 8 + length]
        checksum = content[position + 8 + length : position + 12 + length]
        if zlib.crc32(body, zlib.crc32(kind)).to_bytes(4, "big") != checksum:
            raise SourceError(f"damaged PNG: the checksum of chunk {kind!r} does not fit")
        if kind == b"IEND":
            return
        yield kind, body
        position += 12 + length
    raise SourceError("damaged PNG: it ends early")


def _inflate(compressed: bytes, size: int) -> NDArray[np.uint8]:
    """Decompress to exactly ``size`` bytes, and never to more."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(compressed, size + 1)
    except zlib.error as error:
        raise SourceError(f"damaged PNG: {error}") from None
    if len(raw) != size:
        raise SourceError(f"damaged PNG: {len(raw)} bytes of pixels where {size} belong")
    return np.frombuffer(raw, dtype=np.uint8)


def _unfilter(filters: NDArray[np.uint8], residuals: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo the filters of all rows.

    Rows without a filter are done, and Sub is a running sum, so both take one numpy call for the
    whole image. The other filters also look at the row above: see `_unfilter_span`.

    Args:
        filters: [height], 0 None, 1 Sub, 2 Up, 3 Average, 4 Paeth.
        residuals: [height, width, channels].

    Returns:
        The pixels, of the shape of ``residuals``.
    """
    height, width, channels = residuals.shape
    bordered = np.zeros((height + 1, width + 1, channels), dtype=np.uint8)
    bordered[1:, 1:] = residuals
    sub = filters == 1
    bordered[1:][sub, 1:] = np.cumsum(residuals[sub], axis=1, dtype=np.uint8)
    rows = np.flatnonzero(filters > 1)
    if len(rows) == 0:
        return bordered[1:, 1:]
    left_to_do = np.where(sub, 0, filters).astype(np.uint8)
    # A span costs width + height steps, so rows far apart are cheaper in spans of their own.
    for span in np.split(rows, np.flatnonzero(np.diff(rows) > width // 8) + 1):
        first, last = int(span[0]), int(span[-1])
        _unfilter_span(left_to_do[first : last + 1], bordered[first : last + 2])
    return bordered[1:, 1:]


def _unfilter_span(filters: NDArray[np.uint8], bordered: NDArray[np.uint8]) -> None:
    """Undo all filters of consecutive rows in place, along anti-diagonals.

    A pixel needs its left, upper and upper-left neighbours, so all pixels with the same x + y are
    independent of each other; with the border they lie a constant stride apart. Whatever the mix of
    filters, width + height steps are enough.

    Args:
        filters: [height].
        bordered: [height + 1, width + 1, channels], contiguous: the finished row above, then the
            rows to do, each with a zero pixel on its left.
    """
    height, width = bordered.shape[0] - 1, bordered.shape[1] - 1
    flat = bordered.reshape(-1, bordered.shape[2])
    for diagonal in range(height + width - 1):
        first, last = max(0, diagonal - width + 1), min(height - 1, diagonal)
        start = (first + 1) * (width + 1) + diagonal - first + 1  # of pixel (first, diagonal-first)
        stop = start + (last - first) * width + 1
        left, up, corner = (
            flat[start - offset : stop - offset : width].astype(np.int16)
            for offset in (1, width + 1, width + 2)
        )
        guess = left + up - corner
        off_left, off_up, off_corner = abs(guess - left), abs(guess - up), abs(guess - corner)
        paeth = np.where(
            (off_left <= off_up) & (off_left <= off_corner),
            left,
            np.where(off_up <= off_corner, up, corner),
        )
        kind = filters[first : last + 1, None]
        predicted = np.choose(kind, (np.int16(0), left, up, (left + up) >> 1, paeth))
        flat[start:stop:width] += predicted.astype(np.uint8)
