"""`explain_model`: how per-record gradients of each layer are computed, and at what cost.

Nothing here is used in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisewise.text import align_columns
from noisewise.training.engine.fast_gradients import FastGradients
from noisewise.training.engine.layer_interface import NotCoveredError
from noisewise.training.engine.network import Network
from noisewise.training.gradients import FunctionalGradients
from noisewise.training.input_checks import check_sample
from noisewise.training.inputs import Inputs, count_records
from noisewise.training.parameters import check_model

__all__ = ["LayerRow", "ModelExplanation", "explain_model"]

_REPETITIONS = 3
_ADVICE = {
    "rule": "",
    "frozen": "",
    "shared value": "",
    "reference layer": "use layers with a rule, or add one with register_layer_rule",
    "reference engine": "see the reason below",
}


@dataclass(frozen=True)
class LayerRow:
    """One layer of a model.

    Attributes:
        name: in the model.
        kind: its type.
        parameters: number of trainable values.
        path: "rule", "shared value", "reference layer", "reference engine" or "frozen".
        cost: time for its per-record gradients, divided by the time of a step of SGD of the whole
            model; NaN if it was not measured.
        advice: what to change; empty if there is nothing.
    """

    name: str
    kind: str
    parameters: int
    path: str
    cost: float
    advice: str


@dataclass(frozen=True)
class ModelExplanation:
    """How a model is covered.

    Attributes:
        rows: one for each layer with parameters.
        ratio: time of a private step divided by the time of a step of SGD.
        reason: why the reference engine computes the whole model; empty if it does not.
    """

    rows: tuple[LayerRow, ...]
    ratio: float
    reason: str = ""

    def __str__(self) -> str:
        cells = [["layer", "type", "parameters", "path", "cost / SGD", "what to change"]]
        for row in self.rows:
            cost = "" if row.cost != row.cost else f"{row.cost:.2f}"
            cells.append([row.name, row.kind, f"{row.parameters:,}", row.path, cost, row.advice])
        lines = align_columns(cells, right=(2, 4), rule=True)
        lines.append(
            f"A private step takes {max(0.1, self.ratio):.1f} times as long as a step of SGD."
        )
        if self.reason:
            lines.append(f"The reference engine computes the whole model: {self.reason}.")
        return "\n".join(line.rstrip() for line in lines)


def explain_model(model: nn.Module, sample: Inputs) -> ModelExplanation:
    """Explain how per-record gradients of a model are computed, layer by layer.

    Times are the smallest of three runs on the sample, without a loss. They depend on the machine,
    its load and the number of records in the sample.

    Args:
        model: to explain; it is not changed.
        sample: inputs [n, ...] of a usual batch; they may be random numbers.

    Returns:
        A table that can be printed; ``rows`` has its rows.

    Raises:
        UnsupportedModelError: the model is refused.
        InvalidValueError: the model has no trainable parameter, or cannot be called with the
            sample.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> [(row.name, row.path) for row in explain_model(model, torch.rand(5, 4)).rows]
        [('0', 'rule'), ('2', 'rule')]
    """
    check_model(model)
    check_sample(model, sample)
    engine = FastGradients(model, _no_loss)
    theta = engine.layout.flatten(model)
    targets = torch.zeros(count_records(sample), device=theta.device)
    plain = FunctionalGradients(model, _no_loss)
    sgd = _seconds(lambda: plain.batch_gradient(theta, sample, targets))
    private = _seconds(lambda: engine.clipped_sum(theta, sample, targets, 1.0))
    network = engine.network
    costs = {} if network is None else _costs(engine, network, theta, sample, targets)
    rows = []
    for name, module in model.named_modules():
        own = [value for value in module._parameters.values() if value is not None]
        if not own:
            continue
        path = _path(engine, name, any(value.requires_grad for value in own))
        spent = [seconds for use, seconds in costs.items() if use.rpartition(".")[0] == name]
        spent += [costs[name]] if name in costs else []
        cost = sum(spent) / sgd if spent else float("nan")
        count = sum(value.numel() for value in own if value.requires_grad)
        rows.append(LayerRow(name, type(module).__name__, count, path, cost, _ADVICE[path]))
    return ModelExplanation(tuple(rows), private / sgd, engine.fallback_reason or "")


def _no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().square().mean()


def _path(engine: FastGradients, name: str, is_trained: bool) -> str:
    if not is_trained:
        return "frozen"
    if engine.network is None:
        return "reference engine"
    if any(name == whole or name.startswith(whole + ".") for whole in engine.by_reference):
        return "reference layer"
    return "shared value" if name in engine.network.without_rule else "rule"


def _costs(
    engine: FastGradients, network: Network, theta: Tensor, sample: Inputs, targets: Tensor
) -> dict[str, float]:
    """Seconds for the norms and sums of each recorded use, by its name."""
    total = torch.zeros(engine.layout.size, dtype=torch.float64, device=theta.device)
    parts = torch.split(total, list(engine.layout.sizes))
    factors = torch.ones(len(targets), dtype=torch.float64, device=theta.device)
    costs: dict[str, float] = {}
    try:
        uses = engine.layer_uses(theta, sample, targets)
    except NotCoveredError:
        return costs
    for use, g in uses:

        def compute(use: object = use, g: Tensor = g) -> None:
            with torch.no_grad():
                for piece in use.pieces(g):  # type: ignore[attr-defined]
                    piece.squared_norms()
                    piece.add_sum(factors, parts)

        costs[use.name] = costs.get(use.name, 0.0) + _seconds(compute)
    return costs


def _seconds(step: Callable[[], object]) -> float:
    step()  # the first run allocates memory and chooses kernels
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)
