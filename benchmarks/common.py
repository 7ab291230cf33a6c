"""Functions that the benchmarks share: synthetic updates, timing, tables and JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noisewise.data.populations import authors_population
from noisewise.noise.variance import update_noise_variance


@dataclass(frozen=True)
class Updates:
    """An update matrix [p, n] and the true noise energy of each column [n]."""

    name: str
    values: NDArray[np.float32]
    variance: NDArray[np.float64]


def synthetic(p: int, n: int, dist: str = "Dist1", scale: float = 1.0, seed: int = 0) -> Updates:
    """Make updates of low-rank signal plus noise.

    Epsilons and batch sizes are those of the authors' 60 clients, repeated for more clients. The
    noise multiplier is an approximation of the PLD accountant's for N = 2400 and 200 rounds, which
    is sufficient for timing: z = 5.3 (b / 32)^0.45 / eps^0.85.

    Args:
        p: number of parameters.
        n: number of clients.
        dist: name of the authors' population.
        scale: factor of the epsilons.
        seed: seed of signal and noise.
    """
    rng = np.random.default_rng(seed)
    drawn = authors_population(dist, 60, scale)
    epsilon = np.resize(np.array(drawn.epsilons), n)
    batch = np.resize(np.array(drawn.batch_sizes, dtype=float), n)
    z = 5.3 * (batch / 32) ** 0.45 / epsilon**0.85
    steps = np.ceil(2400 / batch)
    variance = update_noise_variance(p, steps, 0.01, 3.0, z, batch)
    values = np.empty((p, n), dtype=np.float32)
    deviation = np.sqrt(variance / p).astype(np.float32)
    common = 0.01 * steps * rng.uniform(0.8, 1.2, n) / np.sqrt(p)
    for start in range(0, p, 1 << 18):
        rows = min(1 << 18, p - start)
        row_scale = np.exp(rng.normal(0, 1, -(-rows // 64))).repeat(64)[:rows]
        signal = np.outer(rng.standard_normal(rows) * row_scale / 1.6, common)
        noise = rng.standard_normal((rows, n), dtype=np.float32) * deviation
        values[start : start + rows] = signal + noise
    return Updates(f"synthetic {dist} {p} x {n}", values, variance)


def from_folder(folder: Path) -> list[Updates]:
    """Read all npz files of a folder; each has arrays ``updates`` [p, n] and ``variance`` [n]."""
    matrices = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            matrices.append(Updates(path.stem, arrays["updates"], arrays["variance"]))
    return matrices


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the smallest processor time of ``repeats`` runs, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as an aligned text table, with floats to six digits."""
    if not rows:
        return "(no rows)"
    names = list(rows[0])

    def show(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    texts = [[show(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(n), *(len(row[i]) for row in texts)) for i, n in enumerate(names)]
    lines = ["  ".join(n.rjust(w) for n, w in zip(names, widths, strict=True))]
    lines += ["  ".join(t.rjust(w) for t, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(lines)


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write the results as JSON, with a description of the machine."""
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
