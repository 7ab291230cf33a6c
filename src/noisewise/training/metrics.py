"""`Metric`: a figure of merit that sums up over records, so that batches and clients combine.

A metric turns each record into one or several numbers; these are added over records, and a function
of the sums is the figure. So r2 or an F1 score of many batches is that of all their records, not a
mean of figures. A figure that depends on ranks (the area under the ROC curve) has no such sums: its
records are joined (`Metric.whole`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from noisewise.errors import InvalidValueError

__all__ = [
    "IGNORED",
    "Contributions",
    "Metric",
    "MetricInfo",
    "Score",
    "accuracy",
    "contributions_of",
    "joined",
    "metrics_of_task",
    "own_metric",
]

IGNORED = -100
"""A target of segmentation and language models that counts for nothing, as in torch."""

Score = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> one score for each record [b]."""

Contributions = Callable[[Tensor, Tensor], Tensor]
"""(outputs [b, ...], targets [b, ...]) -> numbers of each record [b] or [b, k], to be added."""

Combine = Literal["clients", "records"]


@dataclass(frozen=True)
class MetricInfo:
    """What a metric is called and how its figures are read and shown.

    Attributes:
        name: as in configs and tables.
        unit: "%" for a share, which is shown times 100; else the unit of the figure, or "".
        larger_is_better: direction.
        combine: how clients combine: "clients" is the mean of the clients' figures, "records" is
            the figure of all their records together.

    Example:
        >>> MetricInfo("accuracy", "%").text(0.5), MetricInfo("mae", "km", False).text(0.5)
        ('50.0 %', '0.5 km')
    """

    name: str
    unit: str = ""
    larger_is_better: bool = True
    combine: Combine = "clients"

    @property
    def is_accuracy(self) -> bool:
        """Whether tables and figures may call the figure an accuracy."""
        return self.name == "accuracy"

    @property
    def scale(self) -> float:
        """The factor between a figure and what is shown."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def label(self) -> str:
        """Name and unit for an axis or a column, such as ``accuracy [%]``."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    @property
    def best(self) -> str:
        """The word for the better of two figures: ``highest`` or ``lowest``."""
        return "highest" if self.larger_is_better else "lowest"

    def number(self, value: float) -> str:
        """A figure without its unit."""
        return f"{100 * value:.1f}" if self.unit == "%" else f"{value:.4g}"

    def text(self, value: float) -> str:
        """A figure with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()

    def rank(self, value: float) -> float:
        """A number that is smaller for a better figure; infinite for NaN."""
        if math.isnan(value):
            return math.inf
        return -value if self.larger_is_better else value

    @property
    def info(self) -> MetricInfo:
        """The same without the functions of a `Metric`, as results store it."""
        return MetricInfo(self.name, self.unit, self.larger_is_better, self.combine)


def _mean(sums: Tensor, n: int) -> float:
    return float(sums) / n


def _outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


@dataclass(frozen=True)
class Metric(MetricInfo):
    """A metric with the functions that compute it.

    Attributes:
        contributions: numbers of each record, which are added.
        finish: (sums, number of records) -> the figure; by default the mean of one number.
        whole: the figure needs all records at once, such as a rank: contributions are not added
            but joined, and ``finish`` receives them, [N] or [N, k]. Needs ``combine="records"``.

    Example:
        >>> error = Metric("error", "km", False, contributions=lambda o, t: (o - t).abs())
        >>> error.finish(torch.tensor(6.0), 3)
        2.0
    """

    contributions: Contributions = _outputs
    finish: Callable[[Tensor, int], float] = _mean
    whole: bool = False

    def __post_init__(self) -> None:
        if self.whole and self.combine != "records":
            allowed = 'must be "records" for a metric of all records at once (whole=True)'
            raise InvalidValueError(f"metric {self.name}: combine", self.combine, allowed)


def joined(metric: Metric, parts: Sequence[Tensor]) -> Tensor:
    """The contributions of several batches or clients together: their sum, or all of them.

    Args:
        metric: whose ``whole`` decides.
        parts: of `contributions_of`, at least one.
    """
    return torch.cat(list(parts)) if metric.whole else torch.stack(list(parts)).sum(0)


def contributions_of(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """Sums over a batch of a metric's contributions: float64, [] or [k]; if ``whole``, all of them.

    Raises:
        InvalidValueError: the metric does not return one row for each record.
    """
    parts = metric.contributions(outputs, targets)
    if not isinstance(parts, Tensor) or parts.dim() not in (1, 2) or len(parts) != len(targets):
        shape = tuple(parts.shape) if isinstance(parts, Tensor) else type(parts).__name__
        raise InvalidValueError(
            f"metric {metric.name}",
            shape,
            f"must return one score for each record, shape ({len(targets)},), not their mean",
        )
    if metric.whole:
        return parts.double()
    return parts.double().sum() if parts.dim() == 1 else parts.double().sum(dim=0)


def own_metric(part: object, spec: str, field: str) -> Metric:
    """A user's own metric: a `Metric`, or a function with a score for each record.

    Args:
        part: the object.
        spec: its name, for the error.
        field: where the name comes from.

    Raises:
        InvalidValueError: it is neither.
    """
    if isinstance(part, Metric):
        return part
    if not callable(part):
        raise InvalidValueError(field, spec, "must be a Metric or a function")
    name = getattr(part, "__name__", None) or type(part).__name__
    return Metric(name, contributions=part)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each record whose largest output is its class, else 0."""
    return (outputs.argmax(dim=1) == targets).double()


def _class_counts(predicted: Tensor, targets: Tensor, classes: int) -> Tensor:
    """[b, 3 classes]: right predictions, predictions and targets of each class, of each record.

    Targets [b, ...] that are `IGNORED` count for nothing.
    """
    truth, rows = targets.reshape(len(targets), -1), predicted.reshape(len(targets), -1)
    used = truth != IGNORED
    truth = truth.clamp(min=0)

    def count(labels: Tensor, counted: Tensor) -> Tensor:
        zeros = torch.zeros(len(targets), classes, dtype=torch.float64, device=targets.device)
        return zeros.scatter_add_(1, labels, counted.double())

    right = used & (rows == truth)
    return torch.cat([count(truth, right), count(rows, used), count(truth, used)], dim=1)


def _macro_f1(sums: Tensor, n: int) -> float:
    right, predicted, true = sums.reshape(3, -1)
    present = (predicted + true) > 0
    return float((2 * right / (predicted + true).clamp(min=1))[present].mean())


def _balanced(sums: Tensor, n: int) -> float:
    right, _, true = sums.reshape(3, -1)
    return float((right / true.clamp(min=1))[true > 0].mean())


def _mean_iou(sums: Tensor, n: int) -> float:
    right, predicted, true = sums.reshape(3, -1)
    union = predicted + true - right
    return float((right / union.clamp(min=1))[union > 0].mean())


def _of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return _class_counts(outputs.argmax(dim=1), targets, outputs.shape[1])


def _logit(outputs: Tensor) -> Tensor:
    """[b] from one logit [b] or [b, 1] for each record."""
    return outputs.reshape(len(outputs))


def _binary_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((_logit(outputs) > 0) == (targets > 0.5)).double()


def _binary_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    return _class_counts((_logit(outputs) > 0).long(), (targets > 0.5).long(), 2)


def _f1_of_yes(sums: Tensor, n: int) -> float:
    right, predicted, true = (float(part[-1]) for part in sums.reshape(3, -1))
    return 2 * right / max(predicted + true, 1.0)


def _logit_and_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b, 2]: logit and class (0 or 1) of each record."""
    return torch.stack([_logit(outputs).double(), (targets > 0.5).double()], dim=1)


def _auc(rows: Tensor, n: int) -> float:
    """Area under the ROC curve: the share of pairs (yes, no) in which yes has the larger logit.

    Equal logits count half (Mann-Whitney). NaN without both classes, and for logits of NaN.

    Args:
        rows: [N, 2] of `_logit_and_class`.
        n: N.
    """
    logits, yes = rows[:, 0], rows[:, 1]
    positive = float(yes.sum())
    if positive in (0.0, float(n)) or bool(logits.isnan().any()):
        return math.nan
    _, position, counts = torch.unique(logits, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[position]  # the mean rank of equal logits, from 1
    pairs = float((ranks * yes).sum()) - positive * (positive + 1) / 2
    return pairs / (positive * (n - positive))


def _labels_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs > 0) == (targets > 0.5)).double().flatten(1).mean(dim=1)


def _all_labels_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs > 0) == (targets > 0.5)).flatten(1).all(dim=1).double()


def _label_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    yes, true = (outputs > 0).flatten(1).double(), (targets > 0.5).flatten(1).double()
    return torch.cat([yes * true, yes, true], dim=1)


def _micro_f1(sums: Tensor, n: int) -> float:
    right, predicted, true = (float(part.sum()) for part in sums.reshape(3, -1))
    return 2 * right / max(predicted + true, 1.0)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.double().reshape(targets.shape) - targets.double()).reshape(len(targets), -1)


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return _errors(outputs, targets).abs().mean(dim=1)


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return _errors(outputs, targets).square().mean(dim=1)


def _root_mean(sums: Tensor, n: int) -> float:
    return math.sqrt(float(sums) / n)


def _r2_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, target and squared target of each output: [b, 3 k]."""
    truth = targets.double().reshape(len(targets), -1)
    return torch.cat([_errors(outputs, targets).square(), truth, truth.square()], dim=1)


def _r2(sums: Tensor, n: int) -> float:
    """1 - residual / total, the mean over outputs; NaN if a target is constant."""
    residual, total, squares = sums.reshape(3, -1)
    spread = squares - total.square() / n
    noise = 1e-12 * squares.abs()
    return float((1 - residual / torch.where(spread > noise, spread, math.nan)).mean())


def _places_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b, 2]: right positions and counted positions of each record; classes are axis 1."""
    used = targets != IGNORED
    right = (outputs.argmax(dim=1) == targets) & used
    return torch.stack([right.flatten(1).sum(1), used.flatten(1).sum(1)], dim=1)


def _tokens_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return _places_right(outputs.transpose(1, -1), targets)


def _token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b, 2]: sum of the tokens' losses and number of tokens of each record."""
    losses = functional.cross_entropy(
        outputs.transpose(1, -1).double(), targets, reduction="none", ignore_index=IGNORED
    )
    return torch.stack([losses.sum(1), (targets != IGNORED).sum(1).double()], dim=1)


def _ratio(sums: Tensor, n: int) -> float:
    return float(sums[0] / sums[1])


def _perplexity(sums: Tensor, n: int) -> float:
    loss = _ratio(sums, n)
    return math.exp(loss) if loss < 700 else math.inf


def _named(*metrics: Metric) -> Mapping[str, Metric]:
    return MappingProxyType({metric.name: metric for metric in metrics})


_METRICS: Mapping[str, Mapping[str, Metric]] = MappingProxyType(
    {
        "classification": _named(
            Metric("accuracy", "%", contributions=accuracy),
            Metric("macro_f1", "%", True, "records", _of_classes, _macro_f1),
            Metric("balanced_accuracy", "%", True, "records", _of_classes, _balanced),
        ),
        "binary": _named(
            Metric("accuracy", "%", contributions=_binary_right),
            Metric("f1", "%", True, "records", _binary_counts, _f1_of_yes),
            Metric("balanced_accuracy", "%", True, "records", _binary_counts, _balanced),
            Metric("auc", "%", True, "records", _logit_and_class, _auc, whole=True),
        ),
        "multilabel": _named(
            Metric("label_accuracy", "%", contributions=_labels_right),
            Metric("exact_match", "%", contributions=_all_labels_right),
            Metric("micro_f1", "%", True, "records", _label_counts, _micro_f1),
            Metric("macro_f1", "%", True, "records", _label_counts, _macro_f1),
        ),
        "regression": _named(
            Metric("mae", "", False, contributions=_absolute),
            Metric("rmse", "", False, "records", _squared, _root_mean),
            Metric("mse", "", False, contributions=_squared),
            Metric("r2", "", True, "records", _r2_sums, _r2),
        ),
        "segmentation": _named(
            Metric("mean_iou", "%", True, "records", _of_classes, _mean_iou),
            Metric("pixel_accuracy", "%", True, "records", _places_right, _ratio),
        ),
        "language_model": _named(
            Metric("perplexity", "", False, "records", _token_losses, _perplexity),
            Metric("token_accuracy", "%", True, "records", _tokens_right, _ratio),
            Metric("token_loss", "nats", False, "records", _token_losses, _ratio),
        ),
    }
)


def metrics_of_task(task: str) -> Mapping[str, Metric]:
    """The metrics of a built-in task by name; the first is its main one."""
    return _METRICS[task]
