"""`ParameterLayout`: a model's trainable parameters as one flat vector, which gets the noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noisewise.errors import InvalidValueError, UnsupportedModelError, UpdateError

__all__ = [
    "ParameterLayout",
    "check_model",
    "check_no_autocast",
    "state_to_write",
    "written_parameters",
]


def check_model(model: nn.Module) -> None:
    """Reject models whose per-record gradients cannot be bounded, and those without parameters.

    Raises:
        UnsupportedModelError: the model has BatchNorm that is trained or in training mode, which
            mixes the records of a batch; or it is compiled.
        InvalidValueError: no parameter requires a gradient, or one has no shape yet or is complex.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            raise UnsupportedModelError(
                f"module '{name}' is compiled ({type(module).__name__}), so its layers cannot be "
                "seen; pass the model itself instead"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not _is_fixed(module):
            raise UnsupportedModelError(
                f"layer '{name}' is {type(module).__name__}, which mixes the records of a batch: a "
                "record's influence cannot be bounded; use torch.nn.GroupNorm instead, or freeze "
                "its parameters and call eval() on it"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            allowed = "has no shape yet: call the model once with a few made-up records"
            raise InvalidValueError("model", f"parameter '{name}'", allowed)
        if parameter.is_complex() and parameter.requires_grad:
            allowed = "is complex: train real numbers, and use torch.view_as_complex in `forward`"
            raise InvalidValueError("model", f"parameter '{name}'", allowed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValueError("model", type(model).__name__, "has no trainable parameter")


def _is_fixed(module: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether a BatchNorm is a fixed linear map: frozen, in evaluation mode, with statistics."""
    is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
    return is_frozen and not module.training and module.running_mean is not None


def check_no_autocast(device: torch.device) -> None:
    """Reject `torch.autocast`, under which norms and sums would be of other gradients.

    Raises:
        UnsupportedModelError: autocast is active.
    """
    if torch.is_autocast_enabled(device.type):
        raise UnsupportedModelError(
            "torch.autocast is active: under it a record's gradient has no exact norm; call this "
            "outside the autocast block, or train a model in bfloat16"
        )


def written_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that a forward pass changes: those of embeddings with ``max_norm``."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]


def state_to_write(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that a forward pass may change, by name, for `torch.func.functional_call`."""
    written = {id(parameter) for parameter in written_parameters(model)}
    parameters = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if id(parameter) in written
    }
    return parameters | {name: buffer.clone() for name, buffer in model.named_buffers()}


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of the trainable parameters, in the model's order."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """The layout of a model's trainable parameters."""
        trainable = [(n, p.shape) for n, p in model.named_parameters() if p.requires_grad]
        return cls(tuple(n for n, _ in trainable), tuple(s for _, s in trainable))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of values of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    @property
    def size(self) -> int:
        """p, the length of the flat vector."""
        return sum(self.sizes)

    def flatten(self, model: nn.Module) -> Tensor:
        """A copy of the model's trainable parameters as a vector [p]."""
        parameters = dict(model.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Views of ``theta`` [p] by parameter name.

        Raises:
            InvalidValueError: ``theta`` has another shape.
        """
        if theta.shape != (self.size,):
            shape = tuple(theta.shape)
            raise InvalidValueError("theta", shape, f"must have shape ({self.size},)")
        parts = torch.split(theta, list(self.sizes))
        return {n: part.view(s) for n, s, part in zip(self.names, self.shapes, parts, strict=True)}

    def gather(self, arrays: Mapping[str, NDArray[np.float32]]) -> Tensor:
        """Arrays from outside as one vector [p].

        Args:
            arrays: by parameter name; nothing about them is believed. Arrays of other names are not
                read.

        Raises:
            UpdateError: names, shapes or types are not those of the layout; one line of bounded
                length.
        """
        names = list(arrays)
        if len(names) != len(self.names) or set(names) != set(self.names):
            missing = [name for name in self.names if name not in names][:3]
            extra = [str(name)[:40] for name in names if name not in self.names][:3]
            raise UpdateError(f"has other names: missing {missing}, unexpected {extra}")
        theta = torch.empty(self.size, dtype=torch.float32)
        for name, part in self.unflatten(theta).items():
            values = arrays[name]
            if not isinstance(values, np.ndarray) or values.dtype != np.float32:
                kind = str(getattr(values, "dtype", type(values).__name__))[:20]
                raise UpdateError(f"array {name} has dtype {kind}, expected float32")
            if values.shape != tuple(part.shape):
                shape = str(values.shape)[:60]
                raise UpdateError(f"array {name} has shape {shape}, expected {tuple(part.shape)}")
            part.numpy()[...] = values
        return theta

    @torch.no_grad()
    def load(self, model: nn.Module, theta: Tensor) -> None:
        """Copy ``theta`` into the model's trainable parameters."""
        parameters = dict(model.named_parameters())
        for name, value in self.unflatten(theta).items():
            parameters[name].copy_(value)
