"""A model's trainable parameters as one flat vector, which is what travels and gets noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisewise.errors import InvalidValueError, UnsupportedModelError

__all__ = ["ParameterLayout", "check_model"]


def check_model(model: nn.Module) -> None:
    """Refuse models whose layers mix the records of a batch, or that have nothing to train.

    Raises:
        UnsupportedModelError: for BatchNorm, whose statistics leak across records.
        InvalidValueError: if no parameter requires a gradient.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModelError(
                f"layer '{name}' is {type(module).__name__}: it mixes the records of a batch, so a "
                "record's influence cannot be bounded; use torch.nn.GroupNorm instead"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValueError("model", type(model).__name__, "has no trainable parameter")


@dataclass(frozen=True)
class ParameterLayout:
    """Names, shapes and order of the trainable parameters; the order is the model's own."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """Read the layout off a model."""
        trainable = [(n, p.shape) for n, p in model.named_parameters() if p.requires_grad]
        return cls(tuple(n for n, _ in trainable), tuple(s for _, s in trainable))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of values of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    @property
    def size(self) -> int:
        """The paper's p, the length of the flat vector."""
        return sum(self.sizes)

    def flatten(self, model: nn.Module) -> Tensor:
        """The model's trainable parameters as a new vector [p]."""
        parameters = dict(model.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Views of ``theta`` [p] by parameter name."""
        if theta.shape != (self.size,):
            shape = tuple(theta.shape)
            raise InvalidValueError("theta", shape, f"must have shape ({self.size},)")
        parts = torch.split(theta, list(self.sizes))
        return {n: part.view(s) for n, s, part in zip(self.names, self.shapes, parts, strict=True)}

    @torch.no_grad()
    def load(self, model: nn.Module, theta: Tensor) -> None:
        """Copy ``theta`` into the model's trainable parameters."""
        parameters = dict(model.named_parameters())
        for name, value in self.unflatten(theta).items():
            parameters[name].copy_(value)
