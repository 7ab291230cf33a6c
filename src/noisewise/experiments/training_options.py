"""From the tables of ``[training]`` to schedules, optimisers and ``stop_when``."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from noisewise.aggregation.methods import Method
from noisewise.aggregation.schedules import Schedule
from noisewise.aggregation.server_optimisers import ServerOptimiser
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig
from noisewise.federation.run_loop import StopWhen
from noisewise.plugins import load_object
from noisewise.training.local_optimisers import SGD, LocalOptimiser

__all__ = ["load_stop_when", "local_optimiser", "with_training_options"]


def local_optimiser(config: ExperimentConfig) -> LocalOptimiser:
    """The clients' optimiser; plain SGD by default."""
    table = config.training.local_optimiser
    return SGD if table is None else LocalOptimiser(**table.model_dump())


def with_training_options(config: ExperimentConfig, method: Method) -> Method:
    """The method with the config's schedule and server optimiser.

    Raises:
        InvalidValueError: names the invalid field.
    """
    schedule, optimiser = config.training.schedule, config.training.server_optimiser
    if schedule is not None:
        fields = schedule.model_dump()
        fields["rounds"] = fields["rounds"] or config.training.rounds
        method = replace(method, schedule=Schedule(**fields))
    if optimiser is not None:
        method = replace(method, optimiser=ServerOptimiser(**optimiser.model_dump()))
    return method


def load_stop_when(config: ExperimentConfig) -> StopWhen | None:
    """The function that ``training.stop_when`` names.

    Raises:
        InvalidValueError: there is no such function.
    """
    name = config.training.stop_when
    if name is None:
        return None
    function = load_object(name, "training.stop_when")
    if not callable(function):
        raise InvalidValueError("training.stop_when", name, "must be a function")
    return cast(StopWhen, function)
