"""The task of a config: ``[task]``, with the older fields ``training.loss`` and ``metric``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from noisewise.data.datasets import Dataset
from noisewise.data.examples import Examples
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig
from noisewise.plugins import load_object
from noisewise.training.tasks import Task, check_targets, make_task

__all__ = ["config_task", "typed_dataset"]


def config_task(config: ExperimentConfig) -> Task:
    """The task of a config, with the declared number of classes if there is one.

    Raises:
        InvalidValueError: names the invalid field.
    """
    part, training = config.task, config.training
    metrics = part.metrics
    if training.metric is not None:
        if metrics is not None:
            allowed = "must be left out: task.metrics names the metrics"
            raise InvalidValueError("training.metric", training.metric, allowed)
        metrics = [training.metric]
    loss: Any = None
    if training.loss is not None:
        loss = load_object(training.loss, "training.loss")
        if not callable(loss):
            raise InvalidValueError("training.loss", training.loss, "must be a function")
    try:
        return make_task(
            part.name, metrics=metrics, classes=part.classes, loss=loss, unit=part.unit or ""
        )
    except InvalidValueError as error:
        if error.field == "task.metrics" and training.metric is not None:
            raise InvalidValueError("training.metric", error.value, error.allowed) from error
        raise


def typed_dataset(dataset: Dataset, task: Task) -> Dataset:
    """The dataset with targets in the type of the task.

    Raises:
        InvalidValueError: a target does not fit the task.
    """

    def typed(examples: Examples, field: str) -> Examples:
        targets = check_targets(task, examples.targets, field)
        return examples if targets is examples.targets else replace(examples, targets=targets)

    test = None if dataset.test is None else typed(dataset.test, "test_targets")
    return replace(dataset, train=typed(dataset.train, "targets"), test=test)
