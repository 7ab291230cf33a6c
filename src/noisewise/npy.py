"""Read the header of a ``.npy`` file: the shape and type, before memory is allocated."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

__all__ = ["MAX_HEADER", "VERSIONS", "read_npy_header"]

MAX_HEADER = 10_000  # bytes, as in numpy; numpy's own headers have 128
_MAX_SIZE = 2**63 - 1
VERSIONS = frozenset({(1, 0), (2, 0), (3, 0)})


def read_npy_header(
    file: IO[bytes], versions: Collection[tuple[int, int]] = VERSIONS
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a ``.npy`` file or of a member of an ``.npz`` file.

    The header is not trusted. Its length is checked before it is read, and only literals are
    parsed. It can claim any shape and type: the caller has to compare them with the size of the
    file, and to reject Python objects (``dtype.hasobject``).

    Args:
        file: the file, at its beginning. Afterwards it is at the first byte of the values.
        versions: versions of the format that are accepted.

    Returns:
        The shape, whether the array is stored by columns (Fortran order), and the type.

    Raises:
        ValueError: the header is malformed or too long, or its version is not accepted.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.zeros((2, 3), dtype=np.float32))
        >>> _ = file.seek(0)
        >>> read_npy_header(file)
        ((2, 3), False, dtype('float32'))
    """
    version = npy.read_magic(file)
    if version not in versions:
        allowed = ", ".join(f"{major}.{minor}" for major, minor in sorted(versions))
        raise ValueError(f".npy format {version[0]}.{version[1]}: must be one of {allowed}")
    first = version == (1, 0)
    prefix = file.read(2 if first else 4)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        raise ValueError(f".npy header of {length} bytes: must have at most {MAX_HEADER}")
    header = io.BytesIO(prefix + file.read(length))
    read = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
    try:
        shape, by_columns, dtype = read(header)
    except ValueError:
        raise
    except Exception as error:  # Python's parser raises many types, also MemoryError
        raise ValueError(f".npy header cannot be parsed ({type(error).__name__})") from error
    if any(abs(size) > _MAX_SIZE for size in shape):  # Python cannot print very large integers
        raise ValueError(f".npy header: a size in its shape is above {_MAX_SIZE}")
    return shape, by_columns, dtype
