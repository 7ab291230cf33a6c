"""`Features`: a fixed, public map that a client applies to each record before training.

The map does not depend on private data, so it costs no privacy. The model that is trained, noised
and sent is then only the head. Each record goes through the map alone, in a batch of one, so its
features depend on that record and on nothing else, bit for bit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as decode_safetensors
from torch import Tensor, nn

from noisewise.checks import known_name, matching_name, positive_int
from noisewise.errors import InvalidValueError
from noisewise.plugins import OR_OWN, load_object
from noisewise.training.feature_checks import (
    add_settings,
    add_state,
    declared_range,
    feature_vector,
    in_range,
    one_line,
    probe,
    probe_records,
    state_sha256,
)
from noisewise.training.pinned_files import read_pinned
from noisewise.training.scattering import Scattering

__all__ = ["FEATURES", "Features", "Normalise", "make_features"]

Normalise = Literal["unit", "none"]
Shape = tuple[int, ...]
_VERSION = 1  # of the built-in maps: a new number invalidates cached features


@dataclass(frozen=True, eq=False)
class Features:
    """A fixed map of one record to a vector.

    Attributes:
        name: as in configs.
        module: computes the map of a batch; never trained, always in evaluation mode.
        input_shape: of one record.
        normalise: "unit" divides each vector by its own norm, "none" leaves it as it is.
        width: d, length of a feature vector.
        input_range: (lowest, highest) value of a record, if the module declares it as its attribute
            ``input_range``; such a map takes bytes divided by 255. None for any values.
        identity: SHA-256 of everything that decides the values on this machine: code and attributes
            of your own parts, options, weights, and features of synthetic records. Another
            processor or version of torch may round differently and give another one.
        declared_sha256: SHA-256 of what was declared: name, input shape, options, SHA-256 of the
            weights, constants, normalisation. It is the same on every machine.
        reference: [d] features of a synthetic record, for `check_fixed`.
    """

    name: str
    module: nn.Module
    input_shape: Shape
    normalise: Normalise
    width: int
    identity: str
    declared_sha256: str
    reference: NDArray[np.float32] = field(repr=False)
    input_range: tuple[float, float] | None = None

    def of_record(self, record: NDArray[Any]) -> NDArray[np.float32]:
        """The features [d] of one record.

        Args:
            record: numbers; if the map has an ``input_range``, uint8 is divided by 255.

        Raises:
            InvalidValueError: the record has another shape or values outside of ``input_range``, or
                is uint8 and the map has no ``input_range``; or its features have another width or
                are not finite.
        """
        if record.shape != self.input_shape:
            raise InvalidValueError(
                "record", f"shape {record.shape}", f"must have the shape {self.input_shape}"
            )
        batch = torch.from_numpy(in_range(record, self.input_range, self.name)[None])
        vector = feature_vector(self.module, batch, self.normalise == "unit")
        if len(vector) != self.width:
            raise InvalidValueError(
                f"features of {self.name}", f"{len(vector)} values", f"must be {self.width}"
            )
        if not bool(torch.isfinite(vector).all()):
            raise InvalidValueError(f"features of {self.name}", "NaN or infinite", "must be finite")
        return vector.numpy()

    def of_records(self, records: NDArray[Any]) -> NDArray[np.float32]:
        """The features [N, d] of several records [N, ...]; each goes through the map alone.

        Raises:
            InvalidValueError: see `of_record`.
        """
        rows = np.empty((len(records), self.width), np.float32)
        for number, record in enumerate(records):
            rows[number] = self.of_record(record)
        return rows

    def check_fixed(self) -> None:
        """Check that the map still gives the features that it gave when it was made.

        Raises:
            InvalidValueError: it does not, so its output depends on the records before.
        """
        first = probe_records(self.input_shape)[:1]
        vector = feature_vector(self.module, first, self.normalise == "unit")
        if not np.array_equal(vector.numpy(), self.reference):
            allowed = (
                "must not change while records are mapped: its output depends on earlier records"
            )
            raise InvalidValueError("features.name", self.name, allowed)

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
    name: str | nn.Module,
    input_shape: Shape,
    *,
    options: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    sha256: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    normalise: Normalise = "unit",
) -> Features:
    """A feature map by name, or an encoder of your own.

    Args:
        name: one of `FEATURES`, ``"package.module:function"``, or a torch module, which is copied.
            The function takes ``input_shape``, the tensors by name in ``weights`` if a file is
            given, and the options as keyword arguments; it returns a torch module that maps
            [b, *input_shape] to [b, ...].
        input_shape: of one record.
        options: keyword arguments of the map.
        weights: ``.safetensors`` file, or a ``.pt`` / ``.pth`` file that torch loads with
            ``weights_only=True``; see `read_pinned` for where a relative path is looked up.
        sha256: of the weights' file, which must match; required with ``weights``.
        mean: public constants that are subtracted from the features: one, or one for each.
        std: public constants that the features are divided by after that: one, or one for each.
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
        allowed = (
            f"must be one of {', '.join(get_args(Normalise))}: statistics of private records cost "
            "budget; declare public constants in features.mean and features.std"
        )
        raise InvalidValueError("features.normalise", normalise, allowed)
    if sha256 is not None and weights is None:
        raise InvalidValueError("features.sha256", sha256, "needs features.weights, the file")
    if isinstance(input_shape, Mapping):
        allowed = "must be the shape of one array: a feature map takes no records of several arrays"
        raise InvalidValueError("input_shape", sorted(input_shape), allowed)
    shape = tuple(positive_int("input_shape", size) for size in input_shape)
    if isinstance(name, nn.Module):
        module, title = _own_module(name, options, weights), type(name).__qualname__
        pinned: str | None = state_sha256(module)
    else:
        module, title = _named_module(name, shape, dict(options or {}), weights, sha256), name
        pinned = None if weights is None or sha256 is None else sha256.lower()
    input_range = declared_range(module, title)
    if mean is not None or std is not None:
        module = nn.Sequential(module, _Constants(mean, std)).eval()
    digest = hashlib.sha256(repr((_VERSION, title, shape, normalise, repr(module))).encode())
    add_state(digest, module)
    add_settings(digest, module, _own_options(title, options))
    outputs = probe(module, title, shape, normalise == "unit")
    for output in outputs:  # code that the state does not show
        digest.update(output.numpy().tobytes())
    declared: dict[str, Any] = {
        "name": title,
        "input_shape": list(shape),
        "options": dict(options or {}),
        "sha256": pinned,
        "normalise": normalise,
    }
    declared |= {k: list(v) for k, v in (("mean", mean), ("std", std)) if v is not None}
    text = json.dumps(declared, sort_keys=True, default=repr)
    return Features(
        title,
        module,
        shape,
        normalise,
        len(outputs[0]),
        digest.hexdigest(),
        hashlib.sha256(text.encode()).hexdigest(),
        outputs[0].numpy(),
        input_range,
    )


def _own_options(name: str, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The options of a function of the user; maps of this package show theirs in `repr`."""
    return options or {} if ":" in name and not name.startswith("noisewise.") else {}


def _own_module(
    module: nn.Module, options: Mapping[str, Any] | None, weights: str | Path | None
) -> nn.Module:
    """A copy of a module of the user, which has its weights already."""
    for field_name, value in (("options", options), ("weights", weights)):
        if value:
            shown = sorted(value) if isinstance(value, Mapping) else str(value)
            allowed = "must not be given with a torch module"
            raise InvalidValueError(f"features.{field_name}", shown, allowed)
    return _frozen(deepcopy(module), type(module).__qualname__)


def _named_module(
    name: str,
    input_shape: Shape,
    options: dict[str, Any],
    weights: str | Path | None,
    sha256: str | None,
) -> nn.Module:
    """A built-in map, or the module that a function of the user returns."""
    name = matching_name(name, FEATURES)
    if name in FEATURES:
        if weights is not None:
            raise InvalidValueError("features.weights", str(weights), f"{name} takes no weights")
        return _made(FEATURES[name], name, input_shape, options, {})
    if ":" not in name:
        known_name("features.name", name, FEATURES, OR_OWN)
    function = load_object(name, "features.name")
    if not callable(function):
        raise InvalidValueError("features.name", name, "must be a function")
    tensors = {} if weights is None else {"weights": _read_weights(Path(weights), sha256)}
    first = state_sha256(_made(function, name, input_shape, options, tensors))
    module = _made(function, name, input_shape, options, tensors)
    if state_sha256(module) != first:
        allowed = (
            "must return the same module in every call: it has random tensors; load all of them "
            "from features.weights"
        )
        raise InvalidValueError("features.name", name, allowed)
    return module


def _made(
    function: Callable[..., object],
    name: str,
    input_shape: Shape,
    options: dict[str, Any],
    tensors: dict[str, Any],
) -> nn.Module:
    """The module that a function returns, ready for use."""
    arguments = options | tensors
    try:
        inspect.signature(function).bind(input_shape, **arguments)
    except TypeError as error:
        allowed = f"must fit {name} ({error})"
        raise InvalidValueError("features.options", sorted(options), allowed) from error
    try:
        module = function(input_shape, **arguments)
    except InvalidValueError:
        raise
    except Exception as error:
        allowed = f"must return a torch module ({one_line(error)})"
        raise InvalidValueError("features.name", name, allowed) from error
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise InvalidValueError("features.name", name, f"must return a torch module, not {kind}")
    return _frozen(module, name)


def _frozen(module: nn.Module, name: str) -> nn.Module:
    """The module in evaluation mode, without gradients."""
    try:
        module.eval()  # not chained: a `train` of the user's own may return nothing
        for parameter in module.parameters():  # TorchScript has no `requires_grad_` of modules
            if parameter.is_leaf:  # the parameters of a copy of TorchScript are none
                parameter.requires_grad_(False)
        has_values = not any(
            part.is_meta
            for part in module.state_dict(keep_vars=True).values()
            if isinstance(part, Tensor)
        )
    except ValueError:  # of torch's lazy layers
        has_values = False
    if not has_values:
        allowed = "must have values in all of its parameters; replace lazy layers"
        raise InvalidValueError("features.name", name, allowed)
    return module


class _Constants(nn.Module):
    """(x - mean) / std, with declared public constants."""

    def __init__(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        super().__init__()
        for name, values, default in (("mean", mean, 0.0), ("std", std, 1.0)):
            numbers = torch.tensor([default] if values is None else list(values)).float()
            if not bool(numbers.isfinite().all()) or (name == "std" and bool((numbers <= 0).any())):
                kind = "finite" if name == "mean" else "positive and finite"
                raise InvalidValueError(f"features.{name}", values, f"must be {kind} numbers")
            self.register_buffer(name, numbers)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        for name in ("mean", "std"):
            count = len(self.get_buffer(name))
            if count not in (1, flat.shape[1]):
                allowed = f"must be one number, or one for each of the {flat.shape[1]} features"
                raise InvalidValueError(f"features.{name}", f"{count} numbers", allowed)
        return (flat - self.get_buffer("mean")) / self.get_buffer("std")


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
