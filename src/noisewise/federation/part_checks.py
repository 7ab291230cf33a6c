"""Checks that records, model, loss and metrics fit each other, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisewise.errors import InvalidValueError
from noisewise.federation.clients import Client, to_tensors
from noisewise.training.input_checks import input_advice
from noisewise.training.inputs import (
    Inputs,
    call_arguments,
    concatenate,
    count_records,
    output_of,
    tensors_of,
)
from noisewise.training.local import TensorData
from noisewise.training.metrics import IGNORED, contributions_of
from noisewise.training.parameters import ParameterLayout, check_model
from noisewise.training.synthetic_records import random_parameters
from noisewise.training.tasks import Task, check_loss, check_outputs, check_targets
from noisewise.training.torch_random import torch_seed

__all__ = ["Names", "check_parts", "check_records"]

_PROBES = 8
_TOLERANCE = 1e-4  # relative, between the loss of a batch and the mean of its records' losses


@dataclass(frozen=True)
class Names:
    """What errors call the parts: (field, value)."""

    model: tuple[str, str] = ("model", "the model")
    loss: tuple[str, str] = ("loss", "the loss")
    metric: tuple[str, str] = ("metric", "the metric")


def check_records(task: Task, clients: Sequence[Client]) -> None:
    """Check the targets of all clients.

    Raises:
        InvalidValueError: names the client, the record and its target.
    """
    for part in ("train", "test"):
        targets = [getattr(client.data, part).targets for client in clients]
        try:
            together = np.concatenate(targets)
            fits = check_targets(task, together).dtype == together.dtype
        except (InvalidValueError, ValueError):
            fits = False
        if fits:
            continue
        for client, values in zip(clients, targets, strict=True):
            field = f"client {client.spec.id}: {'' if part == 'train' else 'test_'}targets"
            dtype = check_targets(task, values, field).dtype
            if values.dtype != dtype or values.shape[1:] != targets[0].shape[1:]:
                form = f"{values.dtype}{list(values.shape)}"
                allowed = f"must be {dtype} of shape [N, *{list(targets[0].shape[1:])}]"
                raise InvalidValueError(field, form, f"{allowed} for {task.name}")


def check_parts(
    task: Task,
    model: nn.Module,
    clients: Sequence[Client],
    *,
    names: Names | None = None,
) -> None:
    """Check records, model, loss and metrics by calls with a few records.

    Args:
        task: loss and metrics.
        model: with the initial parameters.
        clients: their records.
        names: of the parts, for errors.

    Raises:
        InvalidValueError: one line that names the part or the record, and what to change.
        UnsupportedModelError: a layer of the model mixes records.
    """
    names = names or Names()
    check_model(model)
    check_loss(task.loss, names.loss[0])
    check_records(task, clients)
    batch = _probe_records(task, clients)
    layout, was_training = ParameterLayout.of(model), model.training
    theta = layout.flatten(model)
    model.eval()
    try:
        with torch.no_grad(), torch_seed(0, torch.device("cpu")):
            outputs = _outputs(model, layout, theta, batch, names)
            check_outputs(task, outputs, batch.targets, names.model[0])
            if task.classes is None and task.targets in ("class", "places"):
                check_records(replace(task, classes=outputs.shape[task.class_axis]), clients)
            varied = [
                _outputs(model, layout, random_parameters(layout, theta, seed), batch, names)
                for seed in (0, 1)
            ]
            _check_that_inputs_matter(batch.inputs, varied, names)
            _check_metrics(task, outputs, batch.targets, names)
            _check_loss(task, outputs, varied[0], batch.targets, names)
    finally:
        model.train(was_training)


def _probe_records(task: Task, clients: Sequence[Client]) -> TensorData:
    """Records for the checks: a few of the first client, and those with extreme integers."""
    train = clients[0].data.train
    chosen = list(range(min(_PROBES, len(train))))
    if train.targets.ndim == 1 and train.targets.dtype.kind in "iu":
        _, first = np.unique(train.targets, return_index=True)
        chosen = sorted({*chosen[:2], *first[:_PROBES].tolist()})
    parts = [to_tensors(train.take(chosen))]
    for client, index in _extreme_records(clients):
        parts.append(to_tensors(client.data.train.take([index])))
    inputs: Inputs = parts[0].inputs
    targets = parts[0].targets
    for part in parts[1:]:
        inputs = concatenate(inputs, part.inputs)
        targets = torch.cat([targets, part.targets])
    return TensorData(inputs, targets)


def _extreme_records(clients: Sequence[Client]) -> list[tuple[Client, int]]:
    """For each input of whole numbers, the records with its largest and its smallest number.

    An embedding that is too small for one record is too small for one of these.
    """
    extremes: dict[tuple[str, int], tuple[int, Client, int]] = {}
    for client in clients:
        for name, values in client.data.train.named_inputs().items():
            scaled = client.data.train.scaling is not None
            if values.dtype.kind not in "iu" or scaled or not values.size:
                continue
            rows = values.reshape(len(values), -1)
            for sign in (1, -1):
                best = rows.max(axis=1) if sign > 0 else rows.min(axis=1)
                index = int(np.argmax(best) if sign > 0 else np.argmin(best))
                value = sign * int(best[index])
                if (name, sign) not in extremes or value > extremes[name, sign][0]:
                    extremes[name, sign] = (value, client, index)
    return [(client, index) for _, client, index in extremes.values()]


def _outputs(
    model: nn.Module, layout: ParameterLayout, theta: Tensor, batch: TensorData, names: Names
) -> Any:
    positional, named = call_arguments(batch.inputs)
    try:
        return output_of(functional_call(model, layout.unflatten(theta), positional, named))
    except Exception as error:
        raise InvalidValueError(*names.model, input_advice(model, batch.inputs, error)) from error


def _check_that_inputs_matter(inputs: Inputs, varied: Sequence[Any], names: Names) -> None:
    """Raise if the outputs are the same for all records, at two random parameter vectors."""
    same = all(torch.equal(x, x[:1].expand_as(x)) for x in tensors_of(inputs))
    if same or count_records(inputs) < 2:
        return
    for outputs in varied:
        if not isinstance(outputs, Tensor) or not bool(torch.isfinite(outputs).all()):
            return
        if not torch.allclose(outputs, outputs[:1].expand_as(outputs), rtol=1e-6, atol=0):
            return
    allowed = "must use its inputs: its outputs are the same for all records"
    raise InvalidValueError(*names.model, allowed)


def _call(part: Callable[..., Any], name: tuple[str, str], expected: str, *arguments: Any) -> Any:
    try:
        return part(*arguments)
    except InvalidValueError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise InvalidValueError(*name, f"must take {expected} ({reason})") from error


_ONE_LOSS = "the model's outputs and targets, and return one number"
_SCORES = "the model's outputs and targets, and return one number for each record"


def _check_metrics(task: Task, outputs: Tensor, targets: Tensor, names: Names) -> None:
    for metric in task.metrics:
        field, value = names.metric
        name = (field, metric.name) if value == "the metric" else names.metric
        try:
            sums = _call(contributions_of, name, _SCORES, metric, outputs, targets)
        except InvalidValueError as error:
            if error.field != f"metric {metric.name}":
                raise
            allowed = f"must take {_SCORES}: shape ({len(targets)},), not {error.value}"
            raise InvalidValueError(*name, allowed) from error
        figure = _call(metric.finish, name, "sums and a number of records", sums, len(targets))
        if not isinstance(figure, (int, float)):
            allowed = f"its `finish` must return one number, not {type(figure).__name__}"
            raise InvalidValueError(*name, allowed)


def _check_loss(task: Task, outputs: Tensor, varied: Any, targets: Tensor, names: Names) -> None:
    loss = _call(task.loss, names.loss, _ONE_LOSS, outputs, targets)
    if not isinstance(loss, Tensor) or loss.shape != ():
        result = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidValueError(*names.loss, f"must take {_ONE_LOSS}: shape (), not {result}")
    one_by_one = [
        _call(task.loss, names.loss, _ONE_LOSS, outputs[k : k + 1], targets[k : k + 1])
        for k in range(len(targets))
    ]
    for record, own in enumerate([loss, *one_by_one], start=-1):
        if not isinstance(own, Tensor) or not bool(torch.isfinite(own).all()):
            where = "a batch" if record < 0 else "a record"
            remedy = "check the model's initial outputs and the range of inputs and targets"
            shown = float(own) if isinstance(own, Tensor) and own.numel() == 1 else own
            raise InvalidValueError(*names.loss, f"must be finite: {where} has {shown}; {remedy}")
    if len(one_by_one) > 1:
        _check_mean(task, varied, targets, names)


def _check_mean(task: Task, outputs: Any, targets: Tensor, names: Names) -> None:
    """Raise if the loss of a batch is not the mean of its records' own losses.

    With random parameters: a model that starts at zero gives all records the same loss. Outputs
    in half precision are compared in float32, because they round by more than the tolerance.
    """
    if isinstance(outputs, Tensor) and outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    whole = task.loss(outputs, targets)
    parts = [task.loss(outputs[k : k + 1], targets[k : k + 1]) for k in range(len(targets))]
    own = torch.stack(parts).double()
    if not bool(torch.isfinite(whole)) or not torch.equal(whole, task.loss(outputs, targets)):
        return

    def differs(value: Tensor) -> bool:
        return abs(float(whole - value)) > _TOLERANCE * max(1.0, abs(float(value)))

    means = [own.mean()]
    if targets.dim() > 1 and not targets.is_floating_point():  # places may be averaged together
        counted = (targets != IGNORED).flatten(1).sum(1).double()
        means.append((own * counted).sum() / counted.sum().clamp(min=1))
    if not all(differs(mean) for mean in means):
        return
    if not differs(own.sum()):
        reason = "it is their sum: divide it by the number of records"
    elif float(own.abs().max()) < _TOLERANCE:
        reason = "it compares records of a batch, which private training takes one by one"
    else:
        reason = (
            "class weights cancel in a batch of one record, and records of a batch must not be "
            "compared: multiply each record's loss by its weight and take the plain mean"
        )
    allowed = (
        f"must be the mean of each record's own loss: a batch has {float(whole):.4g}, its records "
        f"have the mean {float(own.mean()):.4g}; {reason}"
    )
    raise InvalidValueError(*names.loss, allowed)
