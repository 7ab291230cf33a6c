"""Experiments: strict configs, and what they run."""

from noisewise.experiments.comparison import Comparison, compare
from noisewise.experiments.config import (
    ExperimentConfig,
    MethodConfig,
    dump_config,
    load_config,
    parse_config,
)
from noisewise.experiments.runner import run

__all__ = [
    "Comparison",
    "ExperimentConfig",
    "MethodConfig",
    "compare",
    "dump_config",
    "load_config",
    "parse_config",
    "run",
]
