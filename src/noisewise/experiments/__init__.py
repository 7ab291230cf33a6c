"""Strict configs and what they run."""

from noisewise.experiments.comparison import Comparison, compare, comparison_jobs
from noisewise.experiments.config import ExperimentConfig, dump_config, load_config, parse_config
from noisewise.experiments.runner import Job, run
from noisewise.experiments.setup import make_population

__all__ = [
    "Comparison",
    "ExperimentConfig",
    "Job",
    "compare",
    "comparison_jobs",
    "dump_config",
    "load_config",
    "make_population",
    "parse_config",
    "run",
]
