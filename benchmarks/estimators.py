"""Time the estimators: pcp against a plain pcp, factor against one read of the data, and growth.

    python benchmarks/estimators.py --output runs/bench/estimators.json
    python benchmarks/estimators.py --quick

Times are processor seconds on one thread, so other processes hardly change the ratios.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Updates, from_folder, seconds, synthetic, table, write_json
from plain_pcp import plain_pcp

from noisewise.aggregation.weights import inverse_variance_weights
from noisewise.noise import Factor, Norm, excess_noise, make_estimator, principal_component_pursuit
from noisewise.noise.gram import gram_matrix


def pcp_against_plain(updates: Updates, *, full: bool, count: int) -> dict[str, Any]:
    """Compare our pcp with a plain pcp at the same accuracy: residual 1e-6, objective within 1e-4.

    The last two columns are for a plain pcp with our step mu. The ratio then shows the gain from
    the single pass, the over-relaxation and the coarse solution.

    Args:
        updates: the matrix to decompose.
        full: True runs the plain pcp with SVDs to its end. Otherwise its time is the time of five
            iterations, extrapolated to the number of iterations that it needs; these are counted
            with iterates from the Gram matrix.
        count: largest number of iterations of the plain pcp.

    Returns:
        One row of the table.
    """
    M = updates.values
    reference = principal_component_pursuit(M, tolerance=1e-7, gap_tolerance=1e-7)
    ours = principal_component_pursuit(M)
    cost = seconds(lambda: principal_component_pursuit(M), 2)
    if full:
        plain = plain_pcp(M, objective=reference.objective, iterations=count)
        per_iteration = plain.seconds_per_iteration
    else:
        plain = plain_pcp(M, objective=reference.objective, iterations=count, svd=False)
        per_iteration = plain_pcp(M, tolerance=0.0, iterations=5).seconds_per_iteration
    goal = reference.objective
    step = 11 / np.sqrt(max(M.shape))
    tuned = plain_pcp(M, objective=goal, iterations=count, svd=False, step=step)
    return {
        "updates": updates.name,
        "seconds": cost,
        "iterations": ours.iterations,
        "residual": ours.residual,
        "gap": ours.gap,
        "objective - reference": ours.objective / reference.objective - 1,
        "excess": _excess(ours.energy, updates),
        "excess of reference": _excess(reference.energy, updates),
        "plain iterations": plain.iterations,
        "plain residual": plain.residual,
        "plain objective - reference": plain.objective / reference.objective - 1,
        "plain seconds": plain.iterations * per_iteration,
        "ratio": plain.iterations * per_iteration / cost,
        "plain with our step": tuned.iterations,
        "its ratio": tuned.iterations * per_iteration / cost,
    }


def pcp_against_tensorly(updates: Updates) -> dict[str, Any] | None:
    """Compare with tensorly's robust_pca (inexact ALM, increasing mu); None if not installed."""
    try:
        from tensorly.decomposition import robust_pca
    except ImportError:
        return None
    M = updates.values.astype(np.float64)
    lam = 1 / np.sqrt(max(M.shape))
    parts: list[Any] = []

    def run() -> None:
        parts[:] = robust_pca(M, tol=1e-6, reg_E=lam, reg_J=1.0, n_iter_max=1000)

    cost = seconds(run, 1)
    L, S = (np.asarray(part) for part in parts[:2])
    objective = float(np.linalg.svd(L, compute_uv=False).sum() + lam * np.abs(M - L).sum())
    ours = principal_component_pursuit(updates.values)
    return {
        "updates": updates.name,
        "tensorly seconds": cost,
        "ours": seconds(lambda: principal_component_pursuit(updates.values), 2),
        "tensorly objective / ours": objective / ours.objective,
        "tensorly excess": _excess(np.sum(S**2, axis=0), updates),
        "our excess": _excess(ours.energy, updates),
    }


def factor_against_read(updates: Updates) -> dict[str, Any]:
    """Return the time of the factor model relative to one read of the data (a sum of squares)."""
    M = updates.values
    flat = M.reshape(-1)

    def read() -> float:
        return sum(
            float(np.dot(part, part)) for part in np.array_split(flat, max(1, flat.size >> 18))
        )

    plain = seconds(read)
    row: dict[str, Any] = {"updates": updates.name, "read": plain}
    for name, work in {
        "factor": lambda: Factor().estimate(M),
        "factor, all rows": lambda: Factor(sample=None).estimate(M),
        "Gram matrix": lambda: gram_matrix(M),
        "norm": lambda: Norm(sample=None).estimate(M),
    }.items():
        row[name] = seconds(work, 2) / plain
    row["excess of factor"] = _excess(Factor().estimate(M).variance, updates)
    return row


def growth(sizes: list[tuple[int, int]], names: list[str]) -> list[dict[str, Any]]:
    """Time each estimator, with its automatic sample, for several sizes (p, n)."""
    rows = []
    for p, n in sizes:
        updates = synthetic(p, n)
        row: dict[str, Any] = {"p": p, "n": n}
        for name in names:
            estimator = make_estimator(name)
            row[name] = seconds(partial(estimator.estimate, updates.values), 1)
            estimate = estimator.estimate(updates.values)
            row[f"{name} rows"] = int(estimate.details["rows"])
            row[f"{name} excess"] = _excess(estimate.variance, updates)
        rows.append(row)
        print(table([row]), flush=True)
    return rows


def _excess(variance: np.ndarray, updates: Updates) -> float:
    return excess_noise(inverse_variance_weights(variance), updates.variance)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--output", type=Path, default=Path("runs/bench/estimators.json"))
    options.add_argument(
        "--updates", type=Path, help="folder of npz files with updates and variance"
    )
    options.add_argument("--quick", action="store_true", help="small sizes; takes a minute")
    options.add_argument("--full", action="store_true", help="run the plain pcp to its end")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    quick: bool = chosen.quick
    real = from_folder(chosen.updates)[:3] if chosen.updates else []
    small = [synthetic(4000 if quick else 28_938, 20)]
    large = [] if quick else [synthetic(200_000, 20)]
    results: dict[str, Any] = {}
    count = 1000 if quick else 5000
    pcp = [
        pcp_against_plain(updates, full=chosen.full or quick, count=count)
        for updates in real + small + large
    ]
    results["pcp against plain"] = pcp
    print(
        "pcp against a plain pcp (ratio: ours is so many times faster)\n" + table(pcp), flush=True
    )
    tensorly = [row for row in map(pcp_against_tensorly, real[:1] + small) if row]
    results["pcp against tensorly"] = tensorly
    print("\npcp against tensorly\n" + table(tensorly), flush=True)
    reads = [factor_against_read(synthetic(p, 20)) for p in ([10**6] if quick else [11_200_000])]
    results["factor against a read"] = reads
    print("\ntime relative to one read of the data\n" + table(reads), flush=True)
    print("\ngrowth with p and n")
    rows = [10**4, 10**5] if quick else [10**4, 10**5, 10**6, 10**7, 2 * 10**7]
    columns = [10, 40] if quick else [10, 20, 50, 100, 200]
    names = ["norm", "factor", "pcp"]
    results["growth in p"] = growth([(p, 20) for p in rows], names)
    results["growth in n"] = growth([(28_938, n) for n in columns], names)
    write_json(chosen.output, results)
    print(f"\nwritten to {chosen.output}")


if __name__ == "__main__":
    main()
