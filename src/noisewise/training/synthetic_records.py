"""Synthetic records of a declared shape, for all checks before training reads private records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.training.inputs import Inputs, call_arguments, output_of, select, tensors_of
from noisewise.training.parameters import ParameterLayout, state_to_write
from noisewise.training.torch_random import torch_seed

__all__ = [
    "RecordForm",
    "Records",
    "TensorForm",
    "first_records",
    "random_parameters",
    "synthetic_inputs",
    "synthetic_records",
]

Records = tuple[Inputs, Tensor]
"""Inputs [n, ...] and targets [n, ...]."""


@dataclass(frozen=True)
class TensorForm:
    """Shape and type of one tensor of a record.

    Attributes:
        shape: without the records.
        dtype: of the values.
        limit: integers are from 0 to ``limit`` - 1 (vocabulary, classes); None if not declared.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: int | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor [n, ...]; no value is read."""
        return cls(tuple(tensor.shape[1:]), tensor.dtype)


@dataclass(frozen=True)
class RecordForm:
    """The form of one record and its target, which is public.

    Attributes:
        inputs: of each input tensor.
        targets: of the target.
        names: of the inputs, for a model that is called with named tensors; else empty.
    """

    inputs: tuple[TensorForm, ...]
    targets: TensorForm
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Inputs, targets: Tensor) -> RecordForm:
        """The form of tensors [n, ...]; n may be 0, and no value is read."""
        forms = tuple(TensorForm.of(part) for part in tensors_of(inputs))
        names = tuple(inputs) if isinstance(inputs, dict) else ()
        return cls(forms, TensorForm.of(targets), names)

    @classmethod
    def single(
        cls,
        input_shape: tuple[int, ...],
        input_dtype: torch.dtype,
        target_shape: tuple[int, ...],
        target_dtype: torch.dtype,
    ) -> RecordForm:
        """The form of records with one input tensor."""
        inputs = TensorForm(input_shape, input_dtype)
        return cls((inputs,), TensorForm(target_shape, target_dtype))


def first_records(records: Records, count: int) -> Records:
    """The first ``count`` records."""
    return select(records[0], slice(count)), records[1][:count]


def synthetic_records(
    form: RecordForm,
    count: int,
    model: nn.Module,
    works: Callable[[Inputs, Tensor], object],
    device: torch.device,
    seed: int = 0,
) -> Records:
    """Random records that a model and its loss accept.

    Integers are below the limits of the form. Without a limit they may be tokens or classes, whose
    range depends on the model: the range of its embeddings and the number of its outputs are tried,
    then smaller ones. Floating-point values are uniform on [0, 1); inputs of a model with
    embeddings may hold tokens, so whole numbers are tried first. An input with "mask" in its name
    is 1 up to a random position and 0 after it, like the mask of a padded sequence. If nothing
    works, inputs of one whole number are tried as the lengths of the other inputs.

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
    for attempt in _attempts(form, model):
        probe = _inputs(form, 2, attempt, device, torch.Generator().manual_seed(seed))
        for target_limit in _target_limits(form.targets, model, probe):
            generator = torch.Generator().manual_seed(seed)
            inputs = _inputs(form, count, attempt, device, generator)
            targets = _random(form.targets, count, target_limit, generator).to(device)
            try:
                works(inputs, targets)
            except Exception as error:
                last = error
            else:
                return inputs, targets
    assert last is not None
    raise last


def synthetic_inputs(
    form: RecordForm,
    count: int,
    model: nn.Module,
    works: Callable[[Inputs], object],
    device: torch.device,
    seed: int = 0,
) -> Inputs:
    """Random inputs [count, ...] that a model accepts; see `synthetic_records`."""
    last: Exception | None = None
    for attempt in _attempts(form, model):
        generator = torch.Generator().manual_seed(seed)
        inputs = _inputs(form, count, attempt, device, generator)
        try:
            works(inputs)
        except Exception as error:
            last = error
        else:
            return inputs
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


class _Attempt(NamedTuple):
    """How inputs are drawn.

    Attributes:
        limit: of whole numbers for which none is declared.
        longest: inputs of one whole number are from 1 to this; None draws them like the others.
    """

    limit: int
    longest: int | None = None


def _attempts(form: RecordForm, model: nn.Module) -> Iterator[_Attempt]:
    limits = tuple(_input_limits(form, model))
    yield from map(_Attempt, limits)
    sizes = [part.shape[0] for part in form.inputs if part.shape]
    if sizes and min(sizes) > 0 and any(map(_may_be_a_length, form.inputs)):
        yield from (_Attempt(limit, min(sizes)) for limit in limits)


def _may_be_a_length(form: TensorForm) -> bool:
    return not form.shape and not form.dtype.is_floating_point and form.dtype != torch.bool


def _inputs(
    form: RecordForm,
    count: int,
    attempt: _Attempt,
    device: torch.device,
    generator: torch.Generator,
) -> Inputs:
    def values(name: str, part: TensorForm) -> Tensor:
        if "mask" in name and part.shape:
            return _mask(part, count, generator)
        if attempt.longest is not None and _may_be_a_length(part):
            return 1 + _random(part, count, attempt.longest, generator)
        limit = attempt.limit if part.limit is None else part.limit
        return _random(part, count, limit, generator)

    names = form.names or ("",) * len(form.inputs)
    parts = [values(name, part) for name, part in zip(names, form.inputs, strict=True)]
    parts = [part.to(device) for part in parts]
    if form.names:
        return dict(zip(form.names, parts, strict=True))
    return parts[0] if len(parts) == 1 else tuple(parts)


def _random(form: TensorForm, count: int, limit: int, generator: torch.Generator) -> Tensor:
    shape = (count, *form.shape)
    if form.dtype.is_floating_point and limit == 1:
        return torch.rand(shape, generator=generator).to(form.dtype)
    return torch.randint(limit, shape, generator=generator).to(form.dtype)


def _mask(form: TensorForm, count: int, generator: torch.Generator) -> Tensor:
    """1 in the first positions of the last axis, and at least in one; the same on other axes."""
    length = form.shape[-1]
    shape = (count, *(1 for _ in form.shape))
    ends = torch.randint(1, max(2, length + 1), shape, generator=generator)
    return (torch.arange(length) < ends).expand(count, *form.shape).to(form.dtype)


def _input_limits(form: RecordForm, model: nn.Module) -> Iterator[int]:
    """Limits to try for the inputs that declare none."""
    integer = [part for part in form.inputs if not part.dtype.is_floating_point]
    open_forms = [part for part in integer if part.limit is None]
    return _limits((open_forms or integer or form.inputs)[0], _vocabulary(model))


def _target_limits(form: TensorForm, model: nn.Module, probe: Inputs) -> Iterator[int]:
    if form.dtype.is_floating_point or form.limit is not None:
        return _limits(form, None)
    classes = _classes(model, probe, form.shape)
    return _limits(form, _outputs(model) if classes is None else classes)


def _limits(form: TensorForm, range_of_model: int | None) -> Iterator[int]:
    """Exclusive upper limits of integers to try, the largest first."""
    if form.limit is not None:
        yield form.limit
        return
    if form.dtype.is_floating_point:
        if range_of_model is not None:
            yield range_of_model
        yield 1
        return
    if form.dtype == torch.bool:
        yield from (2, 1)
        return
    if range_of_model is not None and range_of_model > 2:
        yield min(range_of_model, torch.iinfo(form.dtype).max)
    yield from (2, 1)


def _vocabulary(model: nn.Module) -> int | None:
    tables = (nn.Embedding, nn.EmbeddingBag)
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, tables)]
    return min(sizes, default=None)


def _classes(model: nn.Module, probe: Inputs, places: tuple[int, ...]) -> int | None:
    """The number of classes that the model scores for a target; None if that is not clear."""
    state = state_to_write(model)
    positional, named = call_arguments(probe)
    try:
        with torch.no_grad(), torch_seed(0, tensors_of(probe)[0].device):
            outputs = output_of(functional_call(model, state, positional, named))
    except Exception:  # such as parameters on another device
        return None
    shape = tuple(outputs.shape[1:])
    if len(shape) != len(places) + 1:
        return None
    if shape[:-1] == tuple(places):
        return int(shape[-1])
    return int(shape[0]) if shape[1:] == tuple(places) else None


def _outputs(model: nn.Module) -> int | None:
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return layers[-1].out_features if layers else None
