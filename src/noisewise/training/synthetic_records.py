"""Synthetic records of a declared shape, for all checks before training reads private records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisewise.training.parameters import ParameterLayout

__all__ = ["RecordForm", "random_parameters", "synthetic_records"]


@dataclass(frozen=True)
class RecordForm:
    """Shape and type of one record and its target, which are public."""

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target_shape: tuple[int, ...]
    target_dtype: torch.dtype

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> RecordForm:
        """The form of tensors [n, ...]; n may be 0, and no value is read."""
        return cls(tuple(inputs.shape[1:]), inputs.dtype, tuple(targets.shape[1:]), targets.dtype)


def synthetic_records(
    form: RecordForm,
    count: int,
    model: nn.Module,
    works: Callable[[Tensor, Tensor], object],
    device: torch.device,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Random records that a model and its loss accept.

    Floating-point values are uniform on [0, 1). Integers may be tokens or classes, whose range
    depends on the model: the ranges of its embeddings and of its output layer are tried, then
    smaller ones.

    Args:
        form: of the records.
        count: number of records.
        model: its layers give the ranges of integers.
        works: (inputs, targets) -> anything; raises if the model or the loss rejects them.
        device: of the records.
        seed: of the values.

    Returns:
        Inputs [count, ...] and targets [count, ...].

    Raises:
        Exception: the last exception of ``works``, if it rejects even records of zeros.
    """
    last: Exception | None = None
    for input_limit in _limits(form.input_dtype, _vocabulary(model)):
        for target_limit in _limits(form.target_dtype, _outputs(model)):
            generator = torch.Generator().manual_seed(seed)
            inputs = _random((count, *form.input_shape), form.input_dtype, input_limit, generator)
            targets = _random(
                (count, *form.target_shape), form.target_dtype, target_limit, generator
            )
            inputs, targets = inputs.to(device), targets.to(device)
            try:
                works(inputs, targets)
            except Exception as error:
                last = error
            else:
                return inputs, targets
    assert last is not None
    raise last


def random_parameters(layout: ParameterLayout, like: Tensor, seed: int) -> Tensor:
    """[p] random parameters of the usual scale; those of each layer times a random power of two."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for shape in layout.shapes:
        fan_in = shape[1:].numel() if len(shape) > 1 else 1
        scale = 2.0 ** int(torch.randint(-1, 2, (), generator=generator)) * fan_in**-0.5
        parts.append(torch.randn(shape.numel(), generator=generator) * scale)
    return torch.cat(parts).to(dtype=like.dtype, device=like.device)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, limit: int, generator: torch.Generator
) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype)
    return torch.randint(limit, shape, generator=generator).to(dtype)


def _limits(dtype: torch.dtype, range_of_model: int | None) -> Iterator[int]:
    """Exclusive upper limits of integers to try, the largest first."""
    if dtype.is_floating_point:
        yield 1
        return
    if dtype == torch.bool:
        yield from (2, 1)
        return
    if range_of_model is not None and range_of_model > 2:
        yield min(range_of_model, torch.iinfo(dtype).max)
    yield from (2, 1)


def _vocabulary(model: nn.Module) -> int | None:
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    return min(sizes, default=None)


def _outputs(model: nn.Module) -> int | None:
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return layers[-1].out_features if layers else None
