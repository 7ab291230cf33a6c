"""Local DP-SGD of heads: one linear layer on features, for one or several runs at once.

The gradient of record j is s_j (x_j, a)^T, with the slopes s_j of its loss at the outputs and the
constant a, which is 1 for a layer with bias. Its squared norm is ||s_j||^2 (||x_j||^2 + a^2), so
per-record norms cost nothing: a step takes two matrix products (outputs and clipped sum), the
slopes and the noise.

Runs with the same seed and different methods or learning rates draw the same samples and the same
noise at a client, which makes their comparison paired. `head_updates` then reads samples, noise and
records once, and one matrix product serves all runs.

For simulations only: products and sums are in float32, so the bound on one record's influence that
`local_update` gives a deployed client does not hold. Updates equal those of `local_update` up to
1e-5 of their norm (tests/training/test_heads.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from noisewise.checks import positive_number
from noisewise.errors import InvalidValueError
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import RandomSource
from noisewise.training.engine.linear_model import single_layer
from noisewise.training.engine.loss_gradients import is_cross_entropy
from noisewise.training.gradients import NORMALISE_GAMMA, Loss, NormaliseTo, clip_bound
from noisewise.training.head_products import CACHED_NUMBERS, Floats, HeadProducts, Wide
from noisewise.training.local import TensorData
from noisewise.training.persons import Persons
from noisewise.training.tasks import TASKS

__all__ = ["Head", "HeadRecords", "head_of", "head_outputs", "head_updates", "paired_key"]

Slopes = Callable[[Wide, Floats], None]
"""(outputs [runs, k, b], targets [b, k]) -> None: replaces the outputs by the loss's slopes."""


@dataclass(frozen=True)
class Head:
    """A linear layer with bias or an appended constant, and the slopes of its loss.

    Attributes:
        features: d, the length of a record.
        outputs: k.
        flattens: whether the model flattens records of any shape.
        loss: "softmax", "logistic" (one or several logits) or "squared" (regression).
        constant: a, the number that is appended to each record; None for a layer with bias.
        reshapes: whether the loss takes targets of any shape with k numbers, as those of the tasks
            "binary" and "regression" do.
    """

    features: int
    outputs: int
    flattens: bool
    loss: str
    constant: float | None = None
    reshapes: bool = False

    @property
    def size(self) -> int:
        """Number of parameters: [k, d + 1] with a constant, else weights [k, d] and biases [k]."""
        return self.outputs * (self.features + 1)

    @property
    def offset(self) -> float:
        """The factor of the biases: the constant, or 1."""
        return 1.0 if self.constant is None else self.constant

    def split(self, parameters: Floats) -> tuple[Floats, Floats]:
        """Views of parameters [runs, p]: weights [runs, k, d] and biases [runs, k]."""
        k, d = self.outputs, self.features
        if self.constant is not None:
            both = parameters.reshape(-1, k, d + 1)
            return both[:, :, :d], both[:, :, d]
        return parameters[:, : k * d].reshape(-1, k, d), parameters[:, k * d :]


def head_of(model: nn.Module, loss: Loss) -> Head | None:
    """The head that a model and its loss are, or None if they are something else.

    The model must be `nn.Linear` with bias, alone or in `nn.Sequential`, with or without
    `nn.Flatten` before it, or `noisewise.training.models.head`; in float32 on the CPU, without
    hooks, and with all parameters trainable.
    The loss must be torch's plain cross-entropy, binary cross-entropy with logits or mean squared
    error, or that of the task "binary" or "regression".
    """
    single, kind = single_layer(model), _loss_kind(loss)
    if single is None or kind is None:
        return None
    layer, constant = single.layer, single.constant
    if layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
        return None
    features = layer.in_features - (constant is not None)
    reshapes = any(loss is TASKS[name].loss for name in _RESHAPING)
    return Head(features, layer.out_features, single.flattens, kind, constant, reshapes)


_RESHAPING = {"binary": "logistic", "regression": "squared"}
"""Tasks whose losses reshape the outputs to the targets, and the kinds of these losses."""


def _loss_kind(loss: Loss) -> str | None:
    if is_cross_entropy(loss):
        return "softmax"
    if loss is functional.binary_cross_entropy_with_logits:
        return "logistic"
    if loss is functional.mse_loss:
        return "squared"
    for name, kind in _RESHAPING.items():
        if loss is TASKS[name].loss:
            return kind
    if getattr(loss, "reduction", None) != "mean":
        return None
    if type(loss) is nn.BCEWithLogitsLoss and loss.weight is None and loss.pos_weight is None:
        return "logistic"
    return "squared" if type(loss) is nn.MSELoss else None


def _softmax_slopes(outputs: Wide, targets: Floats) -> None:
    """softmax(outputs) - onehot(classes)."""
    outputs -= np.maximum.reduce(outputs, axis=1, keepdims=True)
    np.exp(outputs, out=outputs)
    outputs /= np.add.reduce(outputs, axis=1, keepdims=True)
    outputs -= targets.T


def _logistic_slopes(outputs: Wide, targets: Floats) -> None:
    """(sigmoid(outputs) - targets) / k: torch's loss is a mean over a record's k outputs."""
    np.negative(outputs, out=outputs)
    np.exp(outputs, out=outputs)
    outputs += 1.0
    np.reciprocal(outputs, out=outputs)
    outputs -= targets.T
    outputs /= outputs.shape[1]


def _squared_slopes(outputs: Wide, targets: Floats) -> None:
    """2 (outputs - targets) / k."""
    outputs -= targets.T
    outputs *= 2.0 / outputs.shape[1]


_SLOPES: Mapping[str, Slopes] = {
    "softmax": _softmax_slopes,
    "logistic": _logistic_slopes,
    "squared": _squared_slopes,
}


@dataclass(frozen=True)
class HeadRecords:
    """A client's records, as views of its tensors, and what is computed from them only once.

    Attributes:
        inputs: [n, d].
        targets: [n, k]; for classes, 1 for a record's class and 0 for the others.
        squared_norms: ||(x, a)||^2 [n].
        finite: [n] records without NaN and infinite numbers, which alone contribute; None if all
            are.
        persons: whose record each one is; None if that is not known.
    """

    inputs: Floats
    targets: Floats
    squared_norms: Wide
    finite: NDArray[np.bool_] | None
    persons: Persons | None = None

    @classmethod
    def of(cls, head: Head, data: TensorData) -> HeadRecords | None:
        """The records of a client; None if the closed form does not cover their form."""
        inputs, targets = data.inputs, data.targets
        if not isinstance(inputs, Tensor):
            return None
        if inputs.dtype != torch.float32 or inputs.device.type != "cpu" or inputs.dim() < 2:
            return None
        if inputs[:1].numel() != head.features * len(inputs[:1]):
            return None
        if not head.flattens and inputs.dim() != 2:
            return None
        numbers = _targets_of(head, targets)
        if numbers is None:
            return None
        flat = inputs.flatten(1).numpy()
        norms = np.empty(len(flat))  # in blocks: a float64 copy of all records would be large
        rows = max(1, CACHED_NUMBERS // head.features)
        for start in range(0, len(flat), rows):
            part = flat[start : start + rows].astype(np.float64)
            norms[start : start + rows] = np.einsum("nd,nd->n", part, part)
        norms += head.offset**2
        finite = np.isfinite(norms)
        return cls(flat, numbers, norms, None if finite.all() else finite, data.persons)

    def __len__(self) -> int:
        return len(self.inputs)

    def blocks(
        self, index: NDArray[np.int64], buffer: Floats
    ) -> Iterator[tuple[Floats, Floats, Wide]]:
        """Inputs, targets and squared norms of the records at ``index``, in parts.

        Args:
            index: increasing positions of records.
            buffer: [rows, d] that parts are copied to.
        """
        if self.finite is not None:
            index = index[self.finite[index]]
        everything = len(index) == len(self)
        for start in range(0, len(index), len(buffer)):
            if everything:
                part: slice | NDArray[np.int64] = slice(start, start + len(buffer))
                x = self.inputs[part]
            else:
                part = index[start : start + len(buffer)]
                x = buffer[: len(part)]
                self.inputs.take(part, 0, x, "clip")  # with "raise", numpy would copy twice
            yield x, self.targets[part], self.squared_norms[part]


def _targets_of(head: Head, targets: Tensor) -> Floats | None:
    """Targets as numbers [n, k]; None for targets of another form."""
    if targets.device.type != "cpu":
        return None
    if head.loss == "softmax":
        if targets.dtype != torch.int64 or targets.dim() != 1:
            return None
        if bool(((targets < 0) | (targets >= head.outputs)).any()):
            return None  # torch ignores class -100
        return functional.one_hot(targets, head.outputs).float().numpy()
    if head.reshapes:
        if targets.dtype not in (torch.int64, torch.float32):
            return None
        targets = targets.flatten(1).float() if targets.dim() > 1 else targets[:, None].float()
    if head.loss == "squared" and head.outputs == 1 and targets.dim() == 1:
        targets = targets[:, None]
    if targets.dtype != torch.float32 or targets.shape[1:] != (head.outputs,):
        return None
    return targets.numpy()


def paired_key(plan: LocalPlan) -> tuple[object, ...]:
    """The values in which plans must agree to be trained together; their noise may differ."""
    sampling = plan.sample_rate, plan.expected_batch, plan.steps_per_round
    return *sampling, plan.clip_norm, plan.clip_rule, plan.unit, plan.max_records


@torch.no_grad()
def head_updates(
    head: Head,
    thetas: Sequence[Tensor],
    records: HeadRecords,
    plans: Sequence[LocalPlan],
    learning_rates: Sequence[float],
    rng: RandomSource,
) -> list[Tensor]:
    """The update of one client in one or several runs that share its records and randomness.

    Args:
        head: the model.
        thetas: [p] each, the runs' global parameters.
        records: of the client.
        plans: of the client in each run, with the same `paired_key`.
        learning_rates: eta of each run.
        rng: the randomness that the runs share.

    Returns:
        The update [p] of each run: what `local_update` returns, up to rounding.

    Raises:
        InvalidValueError: a learning rate is not positive, or the plans protect persons and the
            records have no persons.
    """
    plan = plans[0]
    if plan.unit == "person" and records.persons is None:
        raise InvalidValueError("data.persons", None, "must be given for a plan that protects them")
    for rate in learning_rates:
        positive_number("learning_rate", rate)
    layers, slopes_of = _products(head, thetas), _SLOPES[head.loss]
    steps = np.array(learning_rates) / plan.expected_batch
    noise_steps = (steps * [p.noise_std for p in plans]).astype(np.float32)
    with np.errstate(all="ignore"):  # overflow is found by its result
        for step in range(plan.steps_per_round):
            layers.move()
            if plan.unit == "person":
                _subtract_persons(layers, slopes_of, records, plan, steps, step, rng)
            else:
                index = rng.poisson_sample(step, len(records), plan.sample_rate)
                for x, targets, squared_norms in records.blocks(index, layers.buffer):
                    slopes = layers.outputs(x)
                    slopes_of(slopes, targets)
                    _clip(slopes, squared_norms, clip_bound(plan), steps)
                    layers.subtract_sum(slopes, x)
            if plan.is_private:
                layers.subtract_noise(noise_steps, rng.normal(step, head.size))
    return list(torch.from_numpy(layers.change).unbind())


def _subtract_persons(
    layers: HeadProducts,
    slopes_of: Slopes,
    records: HeadRecords,
    plan: LocalPlan,
    steps: Wide,
    step: int,
    rng: RandomSource,
) -> None:
    """Subtract step size times the bounded mean gradients of a sample of persons.

    The sum over a person's records of s_j (x_j, a)^T is one matrix product. Its norm is that of the
    product itself: a sum cannot be bounded through the norms of its terms.
    """
    assert records.persons is not None
    for chosen in records.persons.sample(step, plan, rng):
        layers.start_sum()
        for x, targets, squared_norms in records.blocks(chosen, layers.buffer):
            slopes = layers.outputs(x)
            slopes_of(slopes, targets)
            _clip(slopes, squared_norms, None, np.full(len(steps), 1.0 / len(chosen)))
            layers.add_to_sum(slopes, x)
        norms, bound = layers.sum_norms(), clip_bound(plan)
        finite, factors = np.isfinite(norms), np.ones(len(norms))
        if bound is not None:
            factors = float(bound) / _divisors(norms, bound)
        layers.subtract_own_sum(np.where(finite, factors, 0.0) * steps)


def _clip(slopes: Wide, squared_norms: Wide, clip_norm: float | None, steps: Wide) -> None:
    """Multiply slopes [runs, k, b] by step size and clip factor; 0 for a norm that is not finite.

    Args:
        slopes: of records whose (x, a) have the squared norms [b].
        squared_norms: [b].
        clip_norm: c; None for no clipping.
        steps: [runs] step sizes.
    """
    norms = np.einsum("rkb,rkb->rb", slopes, slopes)
    norms *= squared_norms
    np.sqrt(norms, out=norms)
    if not math.isfinite(norms.sum()):
        bad = ~np.isfinite(norms)
        norms[bad] = 0.0
        np.copyto(slopes, 0.0, where=bad[:, None])
    if clip_norm is None:
        slopes *= steps[:, None, None]
        return
    np.divide(steps[:, None] * float(clip_norm), _divisors(norms, clip_norm), out=norms)
    slopes *= norms[:, None]


def _divisors(norms: Wide, clip_norm: float) -> Wide:
    """What c is divided by, computed in place: max(norm, c), or norm + 0.01 for `NormaliseTo`."""
    if isinstance(clip_norm, NormaliseTo):
        norms += NORMALISE_GAMMA
        return norms
    return np.maximum(norms, clip_norm, out=norms)


def _products(head: Head, thetas: Sequence[Tensor]) -> HeadProducts:
    start = np.stack([theta.detach().numpy() for theta in thetas])
    return HeadProducts(start, head.split, head.outputs, head.features, head.offset)


def head_outputs(head: Head, thetas: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """The outputs [runs, n, k] of several models for the same records, by one matrix product.

    Args:
        head: the structure of the models.
        thetas: [p] each, their parameters.
        inputs: [n, ...].
    """
    layers = _products(head, thetas)
    layers.move()
    x, rows = inputs.flatten(1).numpy(), len(layers.buffer)
    result = torch.empty(len(thetas), len(x), head.outputs)
    for start in range(0, len(x), rows):
        outputs = layers.outputs(x[start : start + rows])
        result[:, start : start + rows] = torch.from_numpy(outputs).transpose(1, 2)
    return result
