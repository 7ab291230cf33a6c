"""Checks of a feature map on synthetic records: it is fixed and maps each record independently.

A map that fails a check is an error of one line before any record is read. The checks find mistakes
(active dropout, BatchNorm in training mode, weights that were never loaded). They do not detect
code that evades them, so a user who installs an encoder must trust its code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noisewise.data.examples import as_float32
from noisewise.errors import InvalidValueError

__all__ = [
    "add_settings",
    "add_state",
    "declared_range",
    "feature_vector",
    "in_range",
    "one_line",
    "probe",
    "probe_records",
    "state_sha256",
]

Shape = tuple[int, ...]
Range = tuple[float, float]
_PROBES = 3
# Rounding and quantised encoders change the features of a record by less, statistics of a batch by
# more.
_BATCH_TOLERANCE = 0.05
# Modules of these packages show their settings in `repr`.
_SHOW_SETTINGS = frozenset({"torch", "noisewise", "builtins"})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (
    int, float, complex, str, bytes, Enum, PurePath, np.generic, torch.dtype, torch.device,
)  # fmt: skip


def declared_range(module: nn.Module, name: str) -> Range | None:
    """The range of a record's values that a module declares; None without a declaration.

    Args:
        module: with the attribute ``input_range`` = (lowest, highest), or without it.
        name: for the message.

    Raises:
        InvalidValueError: the attribute is no range.
    """
    declared = getattr(module, "input_range", None)
    if declared is None:
        return None
    try:
        lowest, highest = (float(value) for value in declared)
    except (TypeError, ValueError):
        lowest, highest = math.nan, math.nan
    if not -math.inf < lowest < highest < math.inf:
        allowed = f"of {name} must be (lowest, highest)"
        raise InvalidValueError("input_range", declared, allowed)
    return lowest, highest


def in_range(record: NDArray[Any], limits: Range | None, name: str) -> NDArray[np.float32]:
    """A record as new float32 numbers, if they are in the range that a map declares.

    Args:
        record: numbers; with ``limits``, uint8 is divided by 255.
        limits: of `declared_range`.
        name: of the map, for messages.

    Raises:
        InvalidValueError: a value is outside of the range, or the record is uint8 and there is no
            range.
    """
    if limits is None:
        if record.dtype == np.uint8:
            allowed = f"must be float32: {name} does not declare how bytes are scaled"
            raise InvalidValueError("record", "uint8", allowed)
        return as_float32(record)
    values = as_float32(record)
    outside = ~((values >= limits[0]) & (values <= limits[1]))  # also NaN
    if outside.any():
        allowed = (
            f"must be in [{limits[0]:g}, {limits[1]:g}] for {name}: divide bytes by 255, or pass "
            "them as uint8"
        )
        raise InvalidValueError("record", float(values[outside][0]), allowed)
    return values


def feature_vector(module: nn.Module, batch: Tensor, unit: bool) -> Tensor:
    """[d] the features of the one record in a batch.

    Args:
        module: the map.
        batch: [1, ...].
        unit: whether to divide the vector by its norm.
    """
    with torch.inference_mode(), _one_thread():
        # A new copy starts at a multiple of 64 bytes; products round by the place in memory.
        output: Tensor = module(batch.clone()).reshape(-1)
        if output.is_complex():
            raise TypeError("its output has complex numbers")
        vector = output.to(torch.float32)
        if unit:
            # Divided by its largest value first, or the norm of large values would overflow.
            largest = float(vector.abs().max()) if len(vector) else 0.0
            if largest > 0 and math.isfinite(largest):
                vector = vector / largest
                vector = vector / torch.linalg.vector_norm(vector)
    return vector.clone()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: a convolution rounds by the number of threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def probe_records(shape: Shape) -> Tensor:
    """The synthetic records [3, ...]."""
    return torch.rand((_PROBES, *shape), generator=torch.Generator().manual_seed(0))


def add_state(digest: hashlib._Hash, module: nn.Module) -> None:
    """Add the parameters and buffers of a module to a hash."""
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode())
        digest.update(_content(value) if isinstance(value, Tensor) else _described(value).encode())


def _content(tensor: Tensor) -> bytes:
    """The values of a tensor as bytes."""
    plain = tensor.detach().cpu()
    plain = plain.dequantize() if plain.is_quantized else plain
    # A plain copy in one row: the layout may be another one, and a single number has no rows.
    row = plain.clone(memory_format=torch.contiguous_format).flatten()
    return row.view(torch.uint8).numpy().tobytes()


def state_sha256(module: nn.Module) -> str:
    """SHA-256 of the parameters and buffers of a module."""
    digest = hashlib.sha256()
    add_state(digest, module)
    return digest.hexdigest()


def add_settings(digest: hashlib._Hash, module: nn.Module, options: Mapping[str, Any]) -> None:
    """Add what decides the features of an encoder, but may not show on synthetic records.

    These are its options and, of each part whose class is the user's own, the source text of the
    class, its plain attributes and the buffers that `add_state` leaves out. Nothing is added for
    parts of torch and of this package.

    Args:
        digest: receives the values.
        module: the encoder.
        options: that the user gave; empty for a map of this package.
    """
    if options:
        digest.update(_described(options).encode())
    texts: dict[type, str] = {}  # finding one takes much longer than the rest
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            digest.update(str(getattr(part, "code", "")).encode())
        own_kinds = [kind for kind in type(part).__mro__ if _is_own(kind)]
        if own_kinds:
            texts |= {kind: _source(kind) for kind in own_kinds if kind not in texts}
            sources = [texts[kind] for kind in own_kinds]
            own = {key: value for key, value in vars(part).items() if key not in _OF_EVERY_MODULE}
            own |= dict(part.named_buffers(recurse=False))
            digest.update(f"{name}: {sources}: {_described(own)}".encode())


def _is_own(kind: type) -> bool:
    """Whether a class is the user's own, or of another library."""
    return kind.__module__.partition(".")[0] not in _SHOW_SETTINGS


def _source(item: Any) -> str:
    """The source text of a class or function; empty if there is none, as in a console."""
    parts: tuple[Any, ...] = (item, getattr(item, "forward", None))
    for part in parts:  # a notebook has the text of functions only
        try:
            return inspect.getsource(part)
        except Exception:
            continue
    return ""


def _described(value: object) -> str:
    """A text of a value that is the same in every process; only the type of an unknown object."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return str(sorted((_described(key), _described(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_described(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return str(sorted(_described(item) for item in value))
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}{hashlib.sha256(_content(value)).hexdigest()}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, FunctionType):
        return _source(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _described(vars(value))
    return type(value).__qualname__


def probe(module: nn.Module, name: str, shape: Shape, unit: bool) -> list[Tensor]:
    """Features of synthetic records, after checks that the map is fixed and finite.

    Args:
        module: the map, in evaluation mode.
        name: for messages.
        shape: of one record.
        unit: whether vectors are divided by their norms.

    Raises:
        InvalidValueError: the map fails on such records, or its output is random, changes between
            two calls, depends on other records, has several widths or is not finite.
    """
    records, before = probe_records(shape), state_sha256(module)
    random_state = torch.get_rng_state()
    try:
        outputs = [feature_vector(module, record[None], unit) for record in records]
        again = [feature_vector(module, record[None], unit) for record in records.flip(0)]
    except InvalidValueError:
        raise
    except Exception as error:
        allowed = f"must take records of shape {shape} ({one_line(error)})"
        raise InvalidValueError("features.name", name, allowed) from error
    if any(part.training for part in module.modules()):
        raise _fault(name, "must stay in evaluation mode: a part of it trains (dropout, BatchNorm)")
    if not all(bool(torch.isfinite(output).all()) for output in outputs):
        raise _fault(name, "must return finite features")
    same = all(map(torch.equal, outputs, reversed(again)))
    if not same or not torch.equal(random_state, torch.get_rng_state()):
        raise _fault(
            name,
            "must return the same features in every call: its output is random or "
            "depends on earlier records (dropout, BatchNorm in training mode)",
        )
    if state_sha256(module) != before:
        raise _fault(name, "must not change its own tensors: it learns from records")
    if len({len(output) for output in outputs}) > 1 or len(outputs[0]) == 0:
        raise _fault(name, "must return vectors of one length >= 1")
    _check_batch(module, name, records)
    return outputs


def _check_batch(module: nn.Module, name: str, records: Tensor) -> None:
    """Check that records in a batch do not change each other.

    Each record goes through the map alone, so such a map would work; but it would compute
    something else than in its training. A map that takes one record at a time is accepted.
    """
    first = records[0]
    others = torch.stack([first, torch.zeros_like(first), 0.25 * records[1]])
    with torch.inference_mode(), _one_thread():
        try:
            together = module(others.clone())
        except Exception:
            return
        alone = module(first[None].clone()).reshape(-1).float()
    if not together.dim() or len(together) != len(others):
        raise _fault(name, f"must map [b, ...] to [b, d], not to {list(together.shape)}")
    change = alone - together[0].reshape(-1).float()
    if not float(change.abs().max()) <= _BATCH_TOLERANCE * float(alone.abs().max()):
        raise _fault(
            name,
            "must map each record independently: its output changes with the other records of a "
            "batch (BatchNorm with the statistics of the batch)",
        )


def _fault(name: str, allowed: str) -> InvalidValueError:
    return InvalidValueError("features.name", name, allowed)


def one_line(error: Exception) -> str:
    """An error of an encoder's own code, which may have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
