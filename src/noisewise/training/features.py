"""`Features`: a fixed, public map that a client applies to each record before training.

The map does not depend on private data, so it costs no privacy. The model that is trained, noised
and sent is then only the head. Each record goes through the map alone, in a batch of one, so its
features depend on that record and on nothing else, bit for bit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as decode_safetensors
from torch import Tensor, nn

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError
from noisewise.plugins import load_object
from noisewise.training.pinned_files import read_pinned
from noisewise.training.scattering import Scattering

__all__ = ["FEATURES", "Features", "Normalise", "make_features"]

Normalise = Literal["unit", "none"]
Shape = tuple[int, ...]
_VERSION = 1  # of the built-in maps: a new number invalidates cached features
_PROBES = 3


@dataclass(frozen=True, eq=False)
class Features:
    """A fixed map of one record to a vector.

    Attributes:
        name: as in configs.
        module: computes the map of a batch; never trained, always in evaluation mode.
        input_shape: of one record.
        normalise: "unit" divides each vector by its own norm, "none" leaves it as it is.
        width: d, length of a feature vector.
        identity: SHA-256 of everything that decides the values on this machine: code, options,
            weights, and features of made-up records. Another processor or version of torch may
            round differently and give another one.
        declared_sha256: SHA-256 of what was declared: name, input shape, options, SHA-256 of the
            weights, normalisation. It is the same on every machine.
    """

    name: str
    module: nn.Module
    input_shape: Shape
    normalise: Normalise
    width: int
    identity: str
    declared_sha256: str

    def of_record(self, record: NDArray[np.float32]) -> NDArray[np.float32]:
        """The features [d] of one record.

        Raises:
            InvalidValueError: the record has another shape, or its features have another width or
                are not finite.
        """
        if record.shape != self.input_shape:
            raise InvalidValueError(
                "record", f"shape {record.shape}", f"must have the shape {self.input_shape}"
            )
        batch = torch.from_numpy(np.array(record[None], dtype=np.float32))
        vector = _vector(self.module, batch, self.normalise)
        if len(vector) != self.width:
            raise InvalidValueError(
                f"features of {self.name}", f"{len(vector)} values", f"must be {self.width}"
            )
        if not bool(torch.isfinite(vector).all()):
            raise InvalidValueError(f"features of {self.name}", "NaN or infinite", "must be finite")
        return vector.numpy()

    def of_records(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        """The features [N, d] of several records [N, ...]; each goes through the map alone.

        Raises:
            InvalidValueError: see `of_record`.
        """
        rows = np.empty((len(records), self.width), np.float32)
        for number, record in enumerate(records):
            rows[number] = self.of_record(record)
        return rows

    def __repr__(self) -> str:
        return f"Features({self.name!r}, {self.input_shape} -> {self.width}, {self.identity[:12]})"


def _identity(input_shape: Shape) -> nn.Module:
    """The record itself, flattened."""
    return nn.Flatten()


def _scattering(
    input_shape: Shape, scales: int = 2, angles: int = 8, groups: int | None = None
) -> nn.Module:
    """Wavelet scattering and normalisation of groups of channels, per record.

    Args:
        input_shape: (channels, height, width).
        scales: J.
        angles: L.
        groups: of channels that are normalised together; None takes 27, or the largest number
            below it that divides the channels.
    """
    if len(input_shape) != 3:
        raise InvalidValueError(
            "features.name",
            "scattering",
            f"needs records [channels, height, width], not {input_shape}",
        )
    channels, height, width = input_shape
    scattering = Scattering(height, width, scales=scales, angles=angles)
    total = channels * scattering.channels
    if groups is None:
        groups = next(number for number in range(min(27, total), 0, -1) if total % number == 0)
    if total % positive_int("features.options.groups", groups):
        raise InvalidValueError(
            "features.options.groups", groups, f"must divide the {total} channels"
        )
    return nn.Sequential(scattering, nn.GroupNorm(groups, total, affine=False), nn.Flatten())


FEATURES: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"identity": _identity, "scattering": _scattering}
)
"""Built-in maps by name: (input_shape, **options) -> module."""


def make_features(
    name: str,
    input_shape: Shape,
    *,
    options: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    sha256: str | None = None,
    normalise: Normalise = "unit",
) -> Features:
    """A feature map by name, or an encoder of your own.

    Args:
        name: one of `FEATURES`, or ``"package.module:function"``. The function takes
            ``input_shape``, the tensors by name in ``weights`` if a file is given, and the options
            as keyword arguments; it returns a torch module that maps [b, *input_shape] to
            [b, ...].
        input_shape: of one record.
        options: keyword arguments of the map.
        weights: ``.safetensors`` file, or a ``.pt`` / ``.pth`` file that torch loads with
            ``weights_only=True``; see `read_pinned` for where a relative path is looked up.
        sha256: of the weights' file, which must match; required with ``weights``.
        normalise: "unit" divides each vector by its own norm; "none" leaves it as it is.

    Raises:
        InvalidValueError: an unknown name or option, weights that are missing or have another
            SHA-256, or a module whose output changes between two calls, depends on other records,
            or is not finite.

    Example:
        >>> make_features("scattering", (1, 28, 28)).width
        3969
    """
    if normalise not in get_args(Normalise):
        allowed = f"must be one of {', '.join(get_args(Normalise))}"
        raise InvalidValueError("features.normalise", normalise, allowed)
    if sha256 is not None and weights is None:
        raise InvalidValueError("features.sha256", sha256, "needs features.weights, the file")
    given = dict(options or {})
    if name in FEATURES:
        if weights is not None:
            raise InvalidValueError("features.weights", str(weights), f"{name} takes no weights")
        factory = FEATURES[name]
    elif ":" in name:
        loaded = load_object(name, "features.name")
        if not callable(loaded):
            raise InvalidValueError("features.name", name, "must be a function")
        factory = loaded
        if weights is not None:
            given["weights"] = _read_weights(Path(weights), sha256)
    else:
        known = ", ".join(FEATURES)
        allowed = f'must be one of {known}, or "package.module:function"'
        raise InvalidValueError("features.name", name, allowed)
    try:
        inspect.signature(factory).bind(input_shape, **given)
    except TypeError as error:
        shown = sorted(options or {})
        raise InvalidValueError("features.options", shown, f"must fit {name} ({error})") from error
    try:
        module: object = factory(input_shape, **given)
    except InvalidValueError:
        raise
    except Exception as error:
        allowed = f"must return a torch module ({_one_line(error)})"
        raise InvalidValueError("features.name", name, allowed) from error
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise InvalidValueError("features.name", name, f"must return a torch module, not {kind}")
    module.eval().requires_grad_(False)
    digest = hashlib.sha256(repr((_VERSION, name, input_shape, normalise, repr(module))).encode())
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode())
        # A plain copy in one row: the layout may be another one, and a single number has no rows.
        row = value.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
        digest.update(row.view(torch.uint8).numpy().tobytes())
    outputs = _probe(module, name, tuple(input_shape), normalise)
    for output in outputs:  # code that the state does not show
        digest.update(output.numpy().tobytes())
    declared = {
        "name": name,
        "input_shape": list(input_shape),
        "options": dict(options or {}),
        "sha256": None if weights is None or sha256 is None else sha256.lower(),
        "normalise": normalise,
    }
    text = json.dumps(declared, sort_keys=True, default=repr)
    return Features(
        name,
        module,
        tuple(input_shape),
        normalise,
        len(outputs[0]),
        digest.hexdigest(),
        hashlib.sha256(text.encode()).hexdigest(),
    )


def _probe(module: nn.Module, name: str, shape: Shape, normalise: Normalise) -> list[Tensor]:
    """Features of made-up records, after checks that the map is fixed and finite."""
    generator = torch.Generator().manual_seed(0)
    records = torch.rand((_PROBES, *shape), generator=generator)
    try:
        outputs = [_vector(module, record[None], normalise) for record in records]
        again = [_vector(module, record[None], normalise) for record in records.flip(0)]
    except Exception as error:
        allowed = f"must take records of shape {shape} ({_one_line(error)})"
        raise InvalidValueError("features.name", name, allowed) from error
    if any(part.training for part in module.modules()):
        raise InvalidValueError(
            "features.name",
            name,
            "must stay in evaluation mode: a part of it trains (dropout, BatchNorm)",
        )
    for first, second in zip(outputs, reversed(again), strict=True):
        if not bool(torch.isfinite(first).all()):
            raise InvalidValueError("features.name", name, "must give finite features")
        if not torch.equal(first, second):
            raise InvalidValueError(
                "features.name",
                name,
                "must give the same features again: its output is random or "
                "depends on earlier records (dropout, BatchNorm in training mode)",
            )
    if len({len(output) for output in outputs}) > 1 or len(outputs[0]) == 0:
        raise InvalidValueError("features.name", name, "must give vectors of one length >= 1")
    return outputs


def _one_line(error: Exception) -> str:
    """An error of an encoder's own code, which may have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _vector(module: nn.Module, batch: Tensor, normalise: Normalise) -> Tensor:
    """[d] the features of the one record in a batch."""
    with torch.inference_mode(), _one_thread():
        # A new copy starts at a multiple of 64 bytes; products round by the place in memory.
        vector: Tensor = module(batch.clone()).reshape(-1).to(torch.float32)
        if normalise == "unit":
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


def _read_weights(path: Path, sha256: str | None) -> dict[str, Tensor]:
    """The tensors of a file whose SHA-256 was given."""
    content = read_pinned(path, sha256, "features.weights", "features.sha256")
    try:
        if path.suffix == ".safetensors":
            return decode_safetensors(content)
        return _decode_torch(content)
    except Exception as error:
        raise InvalidValueError(
            "features.weights", str(path), f"must hold tensors by name ({type(error).__name__})"
        ) from error


def _decode_torch(content: bytes) -> dict[str, Tensor]:
    import io

    loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise ValueError("not a state dict")
    return loaded
