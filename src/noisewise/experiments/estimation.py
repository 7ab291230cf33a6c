"""First-round updates with their true noise, and how well the estimators recover it."""

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

from noisewise.aggregation.noise_floor import plan_noise
from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.federation.executors import Execution, Workload, one_thread
from noisewise.federation.prepared import Prepared
from noisewise.noise.estimate import Estimator
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.pcp_estimator import PCP
from noisewise.noise.pursuit import principal_component_pursuit
from noisewise.noise.sampling import sample_index
from noisewise.noise.variance import excess_noise
from noisewise.storage import write_atomic
from noisewise.training.parameters import ParameterLayout

__all__ = ["EstimateStudy", "first_round_updates", "read_truth", "save_updates", "study_estimates"]

_STUDY_ROWS = 50_000
_SIZES = (200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


def first_round_updates(
    prepared: Prepared, *, workers: int = 1
) -> tuple[Tensor, NDArray[np.float64]]:
    """Train one round of a prepared run; updates are not divided by their steps.

    Returns:
        Updates [p, n] as the server receives them, and the closed-form noise energy of each [n].
    """
    layout, theta = ParameterLayout.of(prepared.model), prepared.initial_parameters
    rate = prepared.settings.learning_rate
    workload = Workload(
        prepared.model,
        prepared.task.loss,
        tuple(prepared.clients),
        tuple(prepared.plans),
        rate,
        prepared.seed,
        prepared.settings.physical_batch,
    )
    with one_thread():
        executor = Execution(workers).start(workload, theta)
        try:
            columns = executor.updates(theta, 1, range(len(prepared.clients)))
        finally:
            executor.close()
    truth = np.array([plan_noise(plan, layout.size, rate) for plan in prepared.plans])
    return torch.stack(columns, dim=1), truth


def save_updates(path: Path, updates: Tensor, truth: NDArray[np.float64]) -> None:
    """Write ``updates`` and ``true_variance`` as safetensors, for `noisewise estimate`."""
    tensors = {"updates": updates.contiguous(), "true_variance": torch.from_numpy(truth)}
    write_atomic(path, save_tensors(tensors))


def read_truth(path: Path) -> NDArray[np.float64] | None:
    """The array ``true_variance`` of a safetensors file; None if it has none."""
    if path.suffix != ".safetensors":
        return None
    with safe_open(path, framework="np") as arrays:
        present = "true_variance" in arrays.keys()  # noqa: SIM118  (not a mapping)
        return np.asarray(arrays.get_tensor("true_variance")) if present else None


@dataclass(frozen=True)
class EstimateStudy:
    """How well the estimators recover the noise of one update matrix.

    Attributes:
        variance: estimates [n] by estimator.
        truth: [n], or None if it is unknown.
        singular_values: [n] of the updates and of pcp's low-rank part.
        sample_sizes: numbers p' of random coordinates.
        excess: by estimator, noise under its weights over the oracle's at each p'; empty if the
            truth is unknown.
    """

    variance: Mapping[str, NDArray[np.float64]]
    truth: NDArray[np.float64] | None
    singular_values: Mapping[str, NDArray[np.float64]]
    sample_sizes: tuple[int, ...]
    excess: Mapping[str, tuple[float, ...]]


def study_estimates(updates: Tensor, truth: NDArray[np.float64] | None) -> EstimateStudy:
    """Run all estimators on a matrix and on samples of its coordinates, and decompose it by pcp.

    Spectra are computed from at most 50,000 random coordinates and scaled to all.
    """
    p = len(updates)
    sample = updates[torch.from_numpy(sample_index(p, min(p, _STUDY_ROWS), seed=0))]
    scale = np.sqrt(p / len(sample))
    split = principal_component_pursuit(sample)
    gram = (sample.double().T @ sample.double()).numpy()
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
    estimators = {"norm": Norm, "factor": Factor, "pcp": PCP}

    def excess(name: str, size: int) -> float:
        variance = estimators[name](sample=size).estimate(updates).variance
        return excess_noise(inverse_variance_weights(variance), truth)

    return {name: tuple(excess(name, size) for size in sizes) for name in estimators}
