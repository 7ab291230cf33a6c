"""Checks of a model's inputs, with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.errors import InvalidValueError
from noisewise.training.inputs import Inputs, call_arguments, output_of, select, tensors_of
from noisewise.training.parameters import state_to_write
from noisewise.training.torch_random import torch_seed

__all__ = ["check_inputs", "check_sample", "input_advice"]


def check_inputs(inputs: object, field: str = "inputs") -> None:
    """Refuse inputs that are no tensor, tuple or flat dict of tensors of the same records.

    Raises:
        InvalidValueError: names the part that is wrong.
    """
    parts: dict[str, object] = {field: inputs}
    if isinstance(inputs, Mapping):
        parts = {f"{field}[{key!r}]": part for key, part in inputs.items()}
    elif isinstance(inputs, tuple):
        parts = {f"{field}[{number}]": part for number, part in enumerate(inputs)}
    if not parts:
        raise InvalidValueError(field, inputs, "must have at least one tensor [records, ...]")
    records: int | None = None
    for name, part in parts.items():
        if isinstance(part, (Mapping, tuple, list)) and part is not inputs:
            allowed = "must be a tensor: flatten nested inputs into one dict of tensors"
            raise InvalidValueError(name, type(part).__name__, allowed)
        if not isinstance(part, Tensor):
            allowed = "must be a tensor [records, ...], a tuple of tensors or a dict of tensors"
            raise InvalidValueError(name, type(part).__name__, allowed)
        if part.dim() == 0 or len(part) == 0:
            allowed = "must have at least one record: [records, ...]"
            raise InvalidValueError(name, f"shape {tuple(part.shape)}", allowed)
        if records is not None and len(part) != records:
            allowed = f"must be {records}, as in the first tensor"
            raise InvalidValueError(name, f"{len(part)} records", allowed)
        records = len(part)


def check_sample(model: nn.Module, sample: Inputs, field: str = "sample") -> None:
    """Refuse a sample that a model cannot be called with, as a batch or record by record.

    Raises:
        InvalidValueError: one line with the model's error and the likely remedy.
    """
    check_inputs(sample, field)
    for records in (sample, select(sample, slice(1))):
        positional, named = call_arguments(records)
        try:
            with torch.no_grad(), torch_seed(0, tensors_of(records)[0].device):
                output_of(functional_call(model, state_to_write(model), positional, named))
        except InvalidValueError:
            raise
        except Exception as error:
            advice = input_advice(model, records, error)
            raise InvalidValueError("model", "the model", advice) from error


def input_advice(model: nn.Module, inputs: Inputs, error: Exception) -> str:
    """What a model that raised an error must take, and the likely remedy."""
    tensors = tensors_of(inputs)
    keys = list(inputs) if isinstance(inputs, dict) else []
    forms = [f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}" for x in tensors]
    shown = ", ".join(f"{k} {f}" for k, f in zip(keys, forms, strict=True)) if keys else forms[0]
    shown = shown if keys or len(forms) == 1 else ", ".join(forms)
    reason = (str(error).splitlines() or [""])[0][:200]
    text = f"must take inputs of {shown} ({type(error).__name__}: {reason})"
    whole = [x for x in tensors if not x.dtype.is_floating_point and x.numel()]
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    if whole and sizes and isinstance(error, IndexError):
        low, high = min(int(x.min()) for x in whole), max(int(x.max()) for x in whole)
        return f"{text}: inputs are in {low}..{high}, embeddings have {sizes} rows"
    if whole and not sizes:
        text += (
            '; whole numbers stay whole numbers: set data.dtype = "float32" if the model needs '
            "fractions, or data.images = true if they are pixels"
        )
    return text
