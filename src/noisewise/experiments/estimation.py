"""First-round updates with their true noise, and how well the estimators read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from noisewise.aggregation.methods import make_method
from noisewise.aggregation.policy import plan_noise
from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.experiments.config import ExperimentConfig
from noisewise.experiments.runner import Job, training_loss
from noisewise.experiments.setup import make_initial_model, make_plans, make_population
from noisewise.federation.executors import Workload, make_executor, one_thread
from noisewise.noise.estimate import Estimator
from noisewise.noise.factor import Factor
from noisewise.noise.norm import Norm
from noisewise.noise.pcp import PCP
from noisewise.noise.pursuit import principal_component_pursuit
from noisewise.noise.sampling import sample_index
from noisewise.noise.variance import excess_noise
from noisewise.storage import write_atomic
from noisewise.training.parameters import ParameterLayout

__all__ = ["EstimateStudy", "first_round_updates", "read_truth", "save_updates", "study_estimates"]

_STUDY_ROWS = 50_000
_SIZES = (200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


def first_round_updates(
    config: ExperimentConfig, job: Job, *, workers: int = 1
) -> tuple[Tensor, NDArray[np.float64]]:
    """What the server receives in round 1, and the closed-form noise energy of each column.

    Returns:
        Updates [p, n] and true variances [n].
    """
    clients = make_population(config, job.seed)
    plans = make_plans(config, clients, make_method(job.method.name, job.method.options))
    model = make_initial_model(config, job.seed)
    layout = ParameterLayout.of(model)
    theta = layout.flatten(model)
    rate = job.method.learning_rate or config.training.learning_rate
    workload = Workload(
        model,
        training_loss(config),
        clients,
        plans,
        rate,
        job.seed,
        config.training.physical_batch,
    )
    with one_thread():
        executor = make_executor(workload, min(workers, len(clients)), theta)
        try:
            columns = executor.updates(theta, 1, range(len(clients)))
        finally:
            executor.close()
    truth = np.array([plan_noise(plan, layout.size, rate) for plan in plans])
    return torch.stack(columns, dim=1), truth


def save_updates(path: Path, updates: Tensor, truth: NDArray[np.float64]) -> None:
    """Write ``updates`` and ``true_variance`` as safetensors, for `noisewise estimate`."""
    tensors = {"updates": updates.contiguous(), "true_variance": torch.from_numpy(truth)}
    write_atomic(path, save_tensors(tensors))


def read_truth(path: Path) -> NDArray[np.float64] | None:
    """The array ``true_variance`` of a safetensors file, if it has one."""
    if path.suffix != ".safetensors":
        return None
    with safe_open(path, framework="np") as arrays:
        found = "true_variance" in arrays.keys()  # noqa: SIM118  (not a mapping)
        return np.asarray(arrays.get_tensor("true_variance")) if found else None


@dataclass(frozen=True)
class EstimateStudy:
    """How well noise can be read off one update matrix.

    Attributes:
        variance: [n] by estimator.
        truth: [n], or None where nobody knows it.
        singular_values: [n] of the updates and of pcp's low-rank part.
        sample_sizes: numbers p' of random coordinates.
        excess: by estimator, noise of its weights over the oracle's at each p'; empty without
            truth.
    """

    variance: Mapping[str, NDArray[np.float64]]
    truth: NDArray[np.float64] | None
    singular_values: Mapping[str, NDArray[np.float64]]
    sample_sizes: tuple[int, ...]
    excess: Mapping[str, tuple[float, ...]]


def study_estimates(updates: Tensor, truth: NDArray[np.float64] | None) -> EstimateStudy:
    """Run all estimators, split M by pcp, and repeat on samples of the coordinates.

    Spectra are those of at most 50,000 coordinates, drawn at random and scaled to all.
    """
    p = len(updates)
    some = updates[torch.from_numpy(sample_index(p, min(p, _STUDY_ROWS), seed=0))]
    scale = np.sqrt(p / len(some))
    split = principal_component_pursuit(some)
    gram = (some.double().T @ some.double()).numpy()
    spectrum = np.sqrt(np.clip(np.linalg.eigvalsh(gram)[::-1], 0, None))
    estimators: Mapping[str, Estimator] = {"norm": Norm(), "factor": Factor(), "pcp": PCP()}
    sizes = tuple(size for size in _SIZES if size < p)
    return EstimateStudy(
        variance={name: e.estimate(updates).variance for name, e in estimators.items()},
        truth=truth,
        singular_values={"updates M": scale * spectrum, "pcp's L": scale * split.singular_values},
        sample_sizes=sizes,
        excess={} if truth is None else _on_samples(updates, truth, sizes),
    )


def _on_samples(
    updates: Tensor, truth: NDArray[np.float64], sizes: Sequence[int]
) -> dict[str, tuple[float, ...]]:
    made = {"norm": Norm, "factor": Factor, "pcp": PCP}

    def excess(name: str, size: int) -> float:
        variance = made[name](sample=size).estimate(updates).variance
        return excess_noise(inverse_variance_weights(variance), truth)

    return {name: tuple(excess(name, size) for size in sizes) for name in made}
