"""`Evaluator`: metrics of a global model on each client's held-out records, and its train loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.data.datasets import Examples
from noisewise.data.partition import ClientData
from noisewise.federation.clients import to_tensors
from noisewise.federation.round_record import RoundRecord
from noisewise.training.gradients import Loss
from noisewise.training.inputs import Inputs, call_arguments, output_of, select
from noisewise.training.local import TensorData
from noisewise.training.metrics import Metric, accuracy, contributions_of, joined
from noisewise.training.parameters import ParameterLayout, written_parameters
from noisewise.training.tasks import Task

__all__ = ["Evaluator", "Scores", "accuracy", "combined_scores", "with_scores"]

# Larger batches do not fit into the processor's caches: with 1,024 records, the paper's CNN takes
# twice as long.
_BATCH = 128

_MOST_CLASSES = 100  # of a confusion matrix in a result

_Run = Callable[[TensorData], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Scores:
    """Scores of one global model at one client.

    Attributes:
        metrics: each metric of its held-out records, by name; NaN if it has none.
        sums: each metric's contributions, added or joined, by name, so that clients combine.
        records: number of held-out records.
        train_loss: mean loss of its training records, or of a fixed sample of them.
        confusion: number of held-out records by [class, predicted class], if asked for.
    """

    metrics: Mapping[str, float]
    sums: Mapping[str, Tensor]
    records: int
    train_loss: float
    confusion: Tensor | None = None

    @property
    def accuracy(self) -> float:
        """The metric ``accuracy``; NaN if the task has none."""
        return self.metrics.get("accuracy", float("nan"))


def combined_scores(metrics: Sequence[Metric], scores: Sequence[Scores]) -> dict[str, float]:
    """Each metric over all clients: the mean of their figures, or that of all their records.

    Args:
        metrics: of the task; `MetricInfo.combine` says how clients combine.
        scores: of the clients.
    """
    combined = {}
    for metric in metrics:
        tested = [each for each in scores if each.records]
        if metric.combine == "clients" or not tested:
            values = [each.metrics[metric.name] for each in scores]
            combined[metric.name] = float(np.mean(values))
        else:
            total = joined(metric, [each.sums[metric.name] for each in tested])
            combined[metric.name] = metric.finish(total, sum(each.records for each in tested))
    return combined


def with_scores(record: RoundRecord, task: Task, scores: Mapping[str, Scores]) -> RoundRecord:
    """The record of a round with the scores of its model at each client.

    Args:
        record: of the round.
        task: its metrics.
        scores: by client id.
    """
    by_name = {
        metric.name: {client: each.metrics[metric.name] for client, each in scores.items()}
        for metric in task.metrics
    }
    pooled = [metric for metric in task.metrics if metric.combine == "records"]
    counts = [each.confusion for each in scores.values() if each.confusion is not None]
    has_few_classes = bool(counts) and len(counts[0]) <= _MOST_CLASSES
    return replace(
        record,
        accuracy=by_name.pop("accuracy", None),
        metrics=by_name or None,
        overall=combined_scores(pooled, list(scores.values())) if pooled else None,
        train_loss={client: each.train_loss for client, each in scores.items()},
        confusion=torch.stack(counts).sum(0).tolist() if has_few_classes else None,
    )


class Evaluator:
    """Scores a global model on clients' records. Only a simulator can do that, not a server.

    Records are scaled once and kept. Images are kept in the channels-last layout, in which
    max-pooling on a CPU is ten times faster. A model whose own code needs the default layout
    (``x.view``) receives copies in that layout.

    Args:
        model: its structure and buffers are used.
        loss: mean loss of a batch.
        metrics: of the held-out records.
        loss_records: largest number of training records of a client that its train loss is
            computed from; they are spread evenly and the same in every round.
        device: of the tensors, as torch names it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        metrics: Sequence[Metric],
        loss_records: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model, self._loss, self._metrics, self._device = model, loss, metrics, device
        self._loss_records = loss_records
        self._layout = ParameterLayout.of(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._default_layout = False

    def prepare(self, data: ClientData) -> tuple[TensorData, TensorData]:
        """A client's held-out records and its sample of training records, ready for calls."""
        train = data.train
        if len(train) > self._loss_records:
            train = train.take(np.linspace(0, len(train) - 1, self._loss_records).astype(np.int64))
        return self._tensors(data.test), self._tensors(train)

    def _tensors(self, examples: Examples) -> TensorData:
        data = to_tensors(examples, self._device)
        if not isinstance(data.inputs, Tensor) or data.inputs.dim() != 4:
            return data
        # Not .to(memory_format=...), which leaves images of one channel as they are.
        images = torch.empty_like(data.inputs, memory_format=torch.channels_last)
        return TensorData(images.copy_(data.inputs), data.targets)

    def __call__(
        self, theta: Tensor, data: tuple[TensorData, TensorData], confusion: bool = False
    ) -> Scores:
        """Evaluate ``theta`` [p] on a client's records, as `prepare` returned them.

        Args:
            theta: the parameters.
            data: held-out records and training records.
            confusion: count the held-out records by class and predicted class.
        """
        with self.holding(theta):
            return self.scores(data, confusion)

    @torch.no_grad()
    def scores(self, data: tuple[TensorData, TensorData], confusion: bool = False) -> Scores:
        """Evaluate the parameters of `holding` on a client's records."""
        return self._scores(data, self._batches, confusion=confusion)

    @contextmanager
    def holding(self, theta: Tensor) -> Iterator[None]:
        """The model with the parameters ``theta`` in evaluation mode, then as it was.

        The parameters become views of ``theta``. For small models, `functional_call` takes several
        times as long as the model, and so does this context if it is opened for each client.
        """
        values = self._layout.unflatten(theta)
        # mode by mode: a frozen BatchNorm stays in evaluation mode while the rest trains
        modes = [(module, module.training) for module in self._model.modules()]
        before = [(p, p.data) for p in self._model.parameters()]
        self._model.eval()
        try:
            for parameter, name in zip(self._trained, self._layout.names, strict=True):
                parameter.data = values[name].to(parameter.dtype)
            for written in written_parameters(self._model):
                written.data = written.data.clone()
            yield
        finally:
            for parameter, own in before:
                parameter.data = own
            for module, was_training in modes:
                module.training = was_training

    @torch.no_grad()
    def of_outputs(
        self, outputs: Tensor, data: tuple[TensorData, TensorData], confusion: bool = False
    ) -> Scores:
        """Scores of a model from its outputs for both parts of ``data``, one after the other."""
        test, train = data
        split = {id(test): outputs[: len(test)], id(train): outputs[len(test) :]}
        return self._scores(
            data, lambda part: iter([(split[id(part)], part.targets)]), confusion=confusion
        )

    def _scores(self, data: tuple[TensorData, TensorData], run: _Run, *, confusion: bool) -> Scores:
        test, train = data
        parts: dict[str, list[Tensor]] = {}
        counts: Tensor | None = None
        if len(test):
            for outputs, targets in run(test):
                for metric in self._metrics:
                    contributions = contributions_of(metric, outputs, targets)
                    parts.setdefault(metric.name, []).append(contributions)
                if confusion:
                    part = _confusion(outputs, targets)
                    counts = part if counts is None else counts + part
        sums = {m.name: joined(m, parts[m.name]) for m in self._metrics if parts}
        figures = {m.name: m.finish(sums[m.name], len(test)) for m in self._metrics if sums}
        figures = figures or dict.fromkeys((m.name for m in self._metrics), float("nan"))
        train_loss = float("nan")
        if len(train):
            losses = [float(self._loss(*part)) * len(part[1]) for part in run(train)]
            train_loss = sum(losses) / len(train)
        return Scores(figures, sums, len(test), train_loss, counts)

    def _outputs(self, inputs: Inputs) -> Tensor:
        if not isinstance(inputs, Tensor):
            return self._call(inputs)
        if inputs.dim() == 4 and not self._default_layout:
            try:
                return self._call(inputs)
            except RuntimeError:
                self._default_layout = True
        if inputs.dim() != 4:
            return self._call(inputs.contiguous())
        # Not .contiguous(), which leaves images of one channel as they are.
        return self._call(inputs.clone(memory_format=torch.contiguous_format))

    def _call(self, inputs: Inputs) -> Tensor:
        arguments, keywords = call_arguments(inputs)
        return output_of(self._model(*arguments, **keywords))

    def _batches(self, data: TensorData) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and targets of all records, in batches."""
        for start in range(0, len(data), _BATCH):
            inputs = select(data.inputs, slice(start, start + _BATCH))
            yield self._outputs(inputs), data.targets[start : start + _BATCH]


def _confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """Numbers of records [classes, classes] by class and predicted class."""
    one_logit = outputs.numel() == len(targets)
    classes = 2 if one_logit else outputs.shape[1]
    predicted = (outputs.reshape(-1) > 0).long() if one_logit else outputs.argmax(dim=1)
    counts = torch.bincount(targets * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes)
