"""Strict configs and what they run."""

from noisewise.experiments.config import ExperimentConfig, dump_config, load_config, parse_config
from noisewise.experiments.runner import Comparison, Job, compare, comparison_jobs, run

__all__ = [
    "Comparison",
    "ExperimentConfig",
    "Job",
    "compare",
    "comparison_jobs",
    "dump_config",
    "load_config",
    "parse_config",
    "run",
]
