"""The convergence theorem as an artefact: its bound for the weights of each method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from noisewise.aggregation.weights import inverse_variance_weights, proportional_weights
from noisewise.data.populations import authors_population
from noisewise.noise.convergence import ConvergenceBound, convergence_bound
from noisewise.noise.variance import gradient_noise_variance, update_noise_variance
from noisewise.paper.artefacts import Artefact
from noisewise.paper.grids import Cell, Grid
from noisewise.paper.noise_table import noise_multiplier
from noisewise.paper.outcome import Claim, Outcome

__all__ = ["convergence"]


def convergence(artefact: Artefact, columns: Sequence[str]) -> Outcome:
    """Compute the noise term of the bound, as printed and in a variant that keeps the weights."""
    dists = list(columns) or list(artefact.about.options["dists"])
    printed, weighted, largest, drift = {}, {}, {}, []
    for dist in dists:
        bounds = {flag: _bounds(artefact, dist, flag) for flag in (False, True)}
        printed[dist] = {method: b.noise for method, b in bounds[False].items()}
        weighted[dist] = {method: b.noise for method, b in bounds[True].items()}
        drift.append(1 - bounds[True]["DPFedAvg"].noise / bounds[True]["DPFedAvg"].psi_sigma)
        largest[dist] = bounds[False]["DPFedAvg"].largest_rate
    methods = list(next(iter(printed.values())))
    grids = tuple(
        Grid(name, title, tuple(dists), {
            m: {d: Cell(table[d][m] / table[d]["DPFedAvg"]) for d in dists} for m in methods
        }, 3)
        for name, title, table in (
            ("printed", "Noise term as printed, divided by that of uniform weights", printed),
            ("weighted", "The same with the term sum w_i^2 E_i sigma_i^2", weighted),
        )
    )  # fmt: skip
    same = all(len({round(v, 12) for v in row.values()}) == 1 for row in printed.values())
    smaller = all(row["RobustHDP"] < row["DPFedAvg"] for row in weighted.values())
    rates = f"{min(largest.values()):.1e} to {max(largest.values()):.1e}"
    return Outcome(
        grids,
        (
            Claim(
                "the bound rewards noise-aware weights",
                not same,
                "the printed noise term is the same for all weights"
                + (", the variant with weights is smaller for Robust-HDP" if smaller else ""),
            ),
            Claim(
                "the experiments' learning rates (1e-4 to 1e-2) meet the theorem's conditions",
                max(largest.values()) >= 1e-4,
                f"with beta = 1 the conditions allow {rates}",
            ),
        ),
        data={"largest_rate": largest},
        notes=(
            f"At least {min(drift):.1%} of Psi_sigma bounds the drift of local steps, also in the "
            "variant with weights. So the whole bound hardly depends on the weights.",
        ),
    )


def _bounds(artefact: Artefact, dist: str, weighted: bool) -> dict[str, ConvergenceBound]:
    o = artefact.about.options
    population = authors_population(dist, 20)
    b = np.array(population.batch_sizes, dtype=np.float64)
    steps = np.ceil(o["n_examples"] / b)
    z = np.array([
        noise_multiplier(e, o["n_examples"], int(batch), o["rounds"], o["delta"], decimals=None)
        for e, batch in zip(population.epsilons, population.batch_sizes, strict=True)
    ])  # fmt: skip
    gradient = gradient_noise_variance(o["parameters"], o["clip_norm"], z, b)
    update = update_noise_variance(o["parameters"], steps, 1.0, o["clip_norm"], z, b)
    weights = {
        "DPFedAvg": np.full(20, 1 / 20),
        "WeiAvg": proportional_weights(population.epsilons),
        "RobustHDP": inverse_variance_weights(update),
    }
    common = {
        "steps": steps, "gradient_variance": gradient, "rounds": o["rounds"], "smoothness": 1.0,
        "lipschitz": 1.0, "heterogeneity": 0.0, "gap": float(np.log(10)),
        "weighted_noise": weighted,
    }  # fmt: skip
    probe = convergence_bound(weights=weights["DPFedAvg"], learning_rate=1e-9, **common)
    rate = probe.largest_rate
    return {
        method: convergence_bound(weights=w, learning_rate=rate, **common)
        for method, w in weights.items()
    }
