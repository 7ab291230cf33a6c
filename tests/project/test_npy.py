"""Headers of ``.npy`` files: those that numpy writes are read; hostile ones raise ValueError."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from flwr.app import Array
from numpy.lib import format as npy

from noisewise.aggregation.stored_arrays import find_arrays
from noisewise.data.record_files import read_arrays
from noisewise.errors import InvalidValueError, UpdateError
from noisewise.flower.parameter_records import read_theta
from noisewise.npy import MAX_HEADER, read_npy_header
from noisewise.training.parameters import ParameterLayout

Reader = Callable[[IO[bytes]], Any]


def stored(header: bytes, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """The beginning of a ``.npy`` file with any header, which may lie about its length."""
    size = len(header) if length is None else length
    width = 2 if version == (1, 0) else 4
    return b"\x93NUMPY" + bytes(version) + size.to_bytes(width, "little") + header


def with_shape(shape: str, descr: str = "'<f4'") -> bytes:
    """A header that claims a shape."""
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()


HOSTILE = {
    "empty": b"",
    "other magic": b"PK\x03\x04" + bytes(40),
    "no length": b"\x93NUMPY\x01\x00",
    "ends early": stored(b"{", length=100),
    "other version": stored(with_shape("(3,)"), version=(9, 9)),
    "deep signs": stored(b"-" * 9000 + b"1"),
    "deep sums": stored(b"1+" * 4000 + b"1"),
    "open brackets": stored(b"(" * 9000),
    "no end": stored(b"{'a"),
    "keys that cannot be sorted": stored(b"{1: 2, 'a': 3}"),
    "key that cannot be hashed": stored(b"{[]: 1}"),
    "type that is no type": stored(with_shape("(3,)", "'<f4,,'")),
    "type that is no pair": stored(with_shape("(3,)", "(('<f4',), 'b')")),
    "size that cannot be printed": stored(with_shape(f"(0x{'f' * 3700},)")),
    "negative size that cannot be printed": stored(with_shape(f"(-0x{'f' * 3700},)")),
    "too long": stored(with_shape("(3,)") + b" " * MAX_HEADER),
    "claims 4 GiB": stored(b" " * 100, version=(2, 0), length=2**32 - 1),
}


class Watched(io.BytesIO):
    """A file that notes how much was asked of it at once."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.most = max(self.most, 2**63 if size is None or size < 0 else size)
        return super().read(size)


def withstands(read: Reader, content: bytes) -> bool:
    """Whether a reader refuses a header by ValueError and asks for few bytes at once."""
    file = Watched(content)
    try:
        read(file)
    except ValueError:
        return file.most <= MAX_HEADER
    except Exception:
        return False
    return False


def numpy_alone(file: IO[bytes]) -> Any:
    """The planted flaw: the header as numpy reads it."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return read(file)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_numpy_writes_is_read(version: tuple[int, int], order: Any) -> None:
    array = np.zeros((4, 3), dtype="<f8", order=order)
    file = io.BytesIO()
    npy.write_array(file, array, version=version)
    file.seek(0)
    assert read_npy_header(file) == ((4, 3), order == "F", array.dtype)
    assert len(file.read()) == array.nbytes


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_a_value_error(name: str) -> None:
    assert withstands(read_npy_header, HOSTILE[name])


def test_the_check_sees_what_numpy_alone_lets_through() -> None:
    fallen = {name for name, content in HOSTILE.items() if not withstands(numpy_alone, content)}
    assert fallen >= {"deep sums", "no end", "size that cannot be printed", "claims 4 GiB"}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_user_of_headers_refuses_in_one_line(name: str, tmp_path: Path) -> None:
    content = HOSTILE[name]
    alone, packed = tmp_path / "updates.npy", tmp_path / "updates.npz"
    alone.write_bytes(content)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", content)
    for read, path in ((find_arrays, alone), (find_arrays, packed), (read_arrays, packed)):
        with pytest.raises(InvalidValueError, match="file"):
            read(path)
    layout = ParameterLayout(("w",), (torch.Size([3]),))
    with pytest.raises(UpdateError, match="array w"):
        read_theta({"w": Array("float32", (3,), "numpy.ndarray", content + bytes(12))}, layout)


def test_update_in_the_third_format_is_refused() -> None:
    content = stored(with_shape("(3,)"), version=(3, 0)) + bytes(12)
    assert read_npy_header(io.BytesIO(content)) == ((3,), False, np.dtype("<f4"))
    layout = ParameterLayout(("w",), (torch.Size([3]),))
    with pytest.raises(UpdateError, match=r"has no \.npy header"):
        read_theta({"w": Array("float32", (3,), "numpy.ndarray", content)}, layout)
