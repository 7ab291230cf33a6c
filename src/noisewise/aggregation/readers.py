"""Update matrices from files: npz or safetensors with one array ``updates`` of shape p x n."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noisewise.errors import InvalidValueError

__all__ = ["read_updates"]

_ARRAY = "updates"


def read_updates(path: Path | str) -> Tensor:
    """Read the array ``updates`` [p, n] of a file; nothing in the file is ever executed.

    Raises:
        InvalidValueError: if the file cannot be read or does not hold such an array.
    """
    path = Path(path)
    try:
        values = _from_npz(path) if path.suffix == ".npz" else _from_safetensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError(
            "file", str(path), f"must be npz or safetensors that can be read ({error})"
        ) from error
    if values.ndim != 2 or 0 in values.shape or not values.is_floating_point():
        raise InvalidValueError(
            "updates",
            f"{values.dtype} of shape {tuple(values.shape)}",
            "must be floating-point numbers of shape p x n, one column for each client",
        )
    return values


def _from_npz(path: Path) -> Tensor:
    with np.load(path, allow_pickle=False) as arrays:
        _require(path, list(arrays))
        return torch.from_numpy(np.asarray(arrays[_ARRAY]))


def _from_safetensors(path: Path) -> Tensor:
    with safe_open(path, framework="pt") as arrays:
        _require(path, list(arrays.keys()))
        values: Tensor = arrays.get_tensor(_ARRAY)
        return values


def _require(path: Path, names: list[str]) -> None:
    if _ARRAY not in names:
        found = ", ".join(names) or "nothing"
        raise InvalidValueError(
            "file", str(path), f"must hold an array named {_ARRAY}; it holds {found}"
        )
