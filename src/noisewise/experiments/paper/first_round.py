"""Artefacts from first-round updates on real data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from safetensors.torch import load_file

from noisewise.aggregation.weights import inverse_variance_weights, proportional_weights
from noisewise.data.populations import authors_population
from noisewise.errors import InvalidValueError
from noisewise.experiments.estimation import first_round_updates, save_updates
from noisewise.experiments.noise_table import client_variance
from noisewise.experiments.paper.cells import Column, Wishes, cell_name, make_columns
from noisewise.experiments.paper.effort import Effort, read_update_effort, write_update_effort
from noisewise.experiments.paper.outcome import Claim, Outcome
from noisewise.experiments.paper.published import published_table
from noisewise.experiments.paper.registry import Artefact
from noisewise.experiments.runner import Job
from noisewise.experiments.setup import make_population
from noisewise.federation.clients import Client
from noisewise.noise.estimate import Estimator
from noisewise.noise.factor import Factor
from noisewise.noise.norm import Norm
from noisewise.noise.pcp import PCP
from noisewise.noise.pursuit import principal_component_pursuit
from noisewise.noise.variance import aggregate_noise, common_factor, excess_noise
from noisewise.report.estimates import spectrum_figure
from noisewise.report.grids import Cell, Grid
from noisewise.report.paper_figures import Line, grid_figure, lines_figure, weights_panels

__all__ = ["eigenvalues", "estimated_noise", "submatrix_rows", "weights"]

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class FirstRound:
    """What the server received in round 1 of a column under a seed, and what is true about it."""

    updates: torch.Tensor
    truth: Vector
    clients: tuple[Client, ...]
    effort: Effort


def _first_round(column: Column, seed: int, store: Path, workers: int) -> FirstRound:
    """Updates of Robust-HDP's clients, computed once and kept in the store."""
    job = next(
        (j for j in column.jobs if j.method.name == "RobustHDP" and j.seed == seed), column.jobs[0]
    )
    job = Job(job.method, seed)
    rate = job.method.learning_rate or column.config.training.learning_rate
    path = store / cell_name(column) / f"updates-{rate:g}-seed{seed}.safetensors"
    clients = make_population(column.config, seed)
    if not path.exists():
        begun = time.monotonic()
        updates, truth = first_round_updates(column.config, job, workers=workers)
        save_updates(path, updates, truth)
        effort = write_update_effort(path, time.monotonic() - begun)
        return FirstRound(updates, truth, clients, effort)
    arrays = load_file(path)
    truth = arrays["true_variance"].numpy()
    return FirstRound(arrays["updates"], truth, clients, read_update_effort(path))


def _seeds(columns: Sequence[Column]) -> list[int]:
    return sorted({job.seed for column in columns for job in column.jobs})


@dataclass(frozen=True)
class _Weighed:
    """What `weights` says of a column."""

    excess: dict[str, Cell]
    claims: tuple[Claim, ...]
    figure: Figure
    shown: dict[str, Any]
    effort: Effort


def weights(artefact: Artefact, wishes: Wishes, store: Path) -> Outcome:
    """Weights of all methods and Robust-HDP's noise estimates against the truth.

    Clients are shown by rising epsilon, as in the paper. The figures are those of the first seed.
    """
    columns = make_columns(artefact, replace(wishes, methods=("RobustHDP",)))
    pcp = PCP(**artefact.about.options) if artefact.about.options else PCP(sample=None)
    found = {c.name: _weigh(c, pcp, store, wishes.workers) for c in columns}
    methods = next(iter(found.values())).excess
    rows = {m: {name: column.excess[m] for name, column in found.items()} for m in methods}
    title = "Noise of the aggregate over the oracle's (1 is perfect)"
    alone = len(found) == 1
    return Outcome(
        (Grid("excess", title, tuple(found), rows, 4),),
        tuple(
            claim if alone else replace(claim, text=f"{name}: {claim.text}")
            for name, column in found.items()
            for claim in column.claims
        ),
        {"weights" if alone else f"weights-{name}": c.figure for name, c in found.items()},
        next(iter(found.values())).shown if alone else {n: c.shown for n, c in found.items()},
        (*artefact.about.notes, "PFA weights like WeiAvg; its projection comes on top."),
        effort=sum((column.effort for column in found.values()), Effort()),
    )


def _weigh(column: Column, pcp: PCP, store: Path, workers: int) -> _Weighed:
    excess: dict[str, list[float]] = {}
    effort = Effort()
    pictured: tuple[tuple[Claim, ...], Figure, dict[str, Any]] | None = None
    for seed in _seeds([column]):
        first = _first_round(column, seed, store, workers)
        effort += first.effort
        found = pcp.estimate(first.updates)
        epsilons = np.array([client.spec.epsilon for client in first.clients])
        sizes = np.array([client.spec.n_examples for client in first.clients])
        by_method = {
            "RobustHDP": inverse_variance_weights(found.variance),
            "WeiAvg": proportional_weights(epsilons),
            "PFA": proportional_weights(epsilons),
            "DPFedAvg": proportional_weights(sizes),
            "Oracle": inverse_variance_weights(first.truth),
        }
        factor = inverse_variance_weights(Factor().estimate(first.updates).variance)
        for name, w in {**by_method, "RobustHDP with factor": factor}.items():
            excess.setdefault(name, []).append(excess_noise(w, first.truth))
        if pictured is None:
            batches = np.array([client.spec.batch_size for client in first.clients])
            order = np.lexsort((batches, epsilons))
            figure = weights_panels(
                {name: w[order] for name, w in by_method.items()},
                {"RobustHDP": found.variance[order]},
                first.truth[order],
                "clients by rising epsilon (and batch size)",
            )
            claims = _weight_claims(by_method, found.variance, first.truth, epsilons, batches)
            if len(epsilons) == 60 and column.name == "Dist1":  # the one that the paper shows
                claims += _sixty_clients_claims(by_method, epsilons, batches)
            claims += (Claim("the decomposition converged", found.converged, _gap(found.details)),)
            shown = _shown(first, order, by_method, found.variance, batches)
            pictured = claims, figure, shown
    assert pictured is not None
    return _Weighed({name: _mean(values) for name, values in excess.items()}, *pictured, effort)


def _gap(details: Mapping[str, Any]) -> str:
    return f"duality gap {details['gap']:.1e} after {details['iterations']} iterations"


def _shown(
    first: FirstRound,
    order: NDArray[np.intp],
    by_method: Mapping[str, Vector],
    estimate: Vector,
    batches: NDArray[np.int64],
) -> dict[str, Any]:
    specs = [first.clients[k].spec for k in order]
    return {
        "clients": [spec.id for spec in specs],
        "epsilon": [spec.epsilon for spec in specs],
        "batch_size": batches[order].tolist(),
        "weights": {name: w[order].tolist() for name, w in by_method.items()},
        "estimated_variance": estimate[order].tolist(),
        "true_variance": first.truth[order].tolist(),
        "training_seconds": first.effort.seconds if first.effort.complete else math.nan,
    }


def _weight_claims(
    by_method: Mapping[str, Vector],
    estimate: Vector,
    truth: Vector,
    epsilons: Vector,
    batches: NDArray[np.int64],
) -> tuple[Claim, ...]:
    """What the paper says about its figures of weights."""
    mine, oracle, theirs = (by_method[name] for name in ("RobustHDP", "Oracle", "WeiAvg"))
    apart = float(np.max(np.abs(mine - oracle)))
    noise = excess_noise(mine, truth)
    factor = common_factor(estimate, truth)
    claims = [
        Claim(
            "Robust-HDP's weights are close to the optimum",
            noise < 1.05,
            f"{noise:.4f} times the oracle's noise; largest difference of a weight "
            f"{100 * apart:.2f} points; estimates are off by a common factor {factor:.3f}",
        ),
        Claim(
            "the weights of WeiAvg and PFA are not optimal",
            excess_noise(theirs, truth) > 1.05,
            f"{excess_noise(theirs, truth):.2f} times the oracle's noise",
        ),
    ]
    top = int(np.argmax(mine))
    if len(set(batches.tolist())) > 1:
        claims.append(
            Claim(
                "the client with the largest batch gets the largest weight",
                bool(batches[top] == batches.max()),
                f"batch {batches[top]}, epsilon {epsilons[top]:g}, weight {100 * mine[top]:.1f} %",
            )
        )
    return tuple(claims)


def _sixty_clients_claims(
    by_method: Mapping[str, Vector], epsilons: Vector, batches: NDArray[np.int64]
) -> tuple[Claim, ...]:
    """What the paper says of 60 clients under Dist1."""
    mine, oracle = by_method["RobustHDP"], by_method["Oracle"]
    second = int(np.argsort(epsilons, kind="stable")[-2])
    six = float(np.sort(mine)[-6:].sum())
    mixed = len(set(batches.tolist())) > 1
    said = 0.18 if mixed else 0.05
    near = Claim(
        f"the client with the second largest epsilon gets a weight close to {said}",
        bool(abs(mine[second] - said) < 0.02),
        f"{mine[second]:.3f}, oracle {oracle[second]:.3f}",
    )
    if not mixed:
        return (near,)
    return near, Claim("six clients have more than half", six > 0.5, f"{six:.2f}")


def _mean(values: Sequence[float], paper: float = math.nan, deviation: float = math.nan) -> Cell:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Cell(float(np.mean(values)), spread, len(values), paper, deviation)


def eigenvalues(artefact: Artefact, wishes: Wishes, store: Path) -> Outcome:
    """Singular values of M and of the low-rank part L."""
    wanted = replace(wishes, seeds=1, methods=("RobustHDP",))
    columns = make_columns(artefact, wanted)
    figures, data, rows = {}, {}, {}
    claims: list[Claim] = []
    effort = Effort()
    for column in columns:
        first = _first_round(column, column.config.seed, store, wishes.workers)
        effort += first.effort
        split = principal_component_pursuit(first.updates)
        values = torch.linalg.svdvals(first.updates.double()).numpy()
        low = np.sort(split.singular_values)[::-1]
        figures[f"singular-values-{column.name}"] = spectrum_figure({"updates M": values, "L": low})
        data[column.name] = {"M": values.tolist(), "L": low.tolist(), "rank": split.rank}
        claims += _spectrum_claims(column.name, values, low, split.rank)
        rows[column.name] = {
            "rank of M": Cell(float(np.linalg.matrix_rank(first.updates.double().numpy()))),
            "rank of L": Cell(float(split.rank)),
            "M, largest": Cell(float(values[0])),
            "M, smallest": Cell(float(values[-1])),
            "L, largest": Cell(float(low[0])),
            "L, smallest": Cell(float(low[-1])),
        }
    names = tuple(next(iter(rows.values())))
    grid = Grid("spectra", "Spectra of M and of the low-rank part L", names, rows, None)
    notes = tuple(artefact.about.notes)
    return Outcome((grid,), tuple(claims), figures, data, notes, effort=effort)


def _spectrum_claims(name: str, values: Vector, low: Vector, rank: int) -> list[Claim]:
    """What the paper says about its spectra; the energy tells what it does not say."""
    near = int(np.sum(low < 0.01 * values[0]))
    own = int(np.sum(low < 0.05 * low[0]))
    energy = float(np.sum(low**2) / np.sum(values**2))
    return [
        Claim(
            f"{name}: most singular values of L are close to 0",
            near > len(low) / 2,
            f"{near} of {len(low)} below 1 % of M's largest, {own} below 5 % of L's own largest; L "
            f"has {energy:.1e} of M's energy",
        ),
        Claim(f"{name}: L is of low rank", rank <= len(low) / 2, f"rank {rank} of {len(low)}"),
    ]


def estimated_noise(artefact: Artefact, wishes: Wishes, store: Path) -> Outcome:
    """The row Robust-HDP of the noise table: real estimates, noise in the paper's convention."""
    about = artefact.about
    columns = make_columns(artefact, replace(wishes, methods=("RobustHDP",)))
    paper = published_table("noise_fmnist_round1")
    estimators: dict[str, Estimator] = {
        "RobustHDP": PCP(sample=None),
        "RobustHDP with factor": Factor(),
        "norm": Norm(),
    }
    rows: dict[str, dict[str, Cell]] = {name: {} for name in estimators}
    excess: dict[str, dict[str, Cell]] = {name: {} for name in estimators}
    effort = Effort()
    for column in columns:
        variance = client_variance(authors_population(column.name, column.config.data.clients))
        noise: dict[str, list[float]] = {name: [] for name in estimators}
        above: dict[str, list[float]] = {name: [] for name in estimators}
        for seed in _seeds([column]):
            first = _first_round(column, seed, store, wishes.workers)
            effort += first.effort
            for name, estimator in estimators.items():
                w = inverse_variance_weights(estimator.estimate(first.updates).variance)
                noise[name].append(aggregate_noise(w, variance))
                above[name].append(excess_noise(w, variance))
        figure, spread = paper["RobustHDP"][column.name][0], paper["RobustHDP_std"][column.name][0]
        for name in estimators:
            theirs = (figure, spread) if name == "RobustHDP" else (math.nan, math.nan)
            rows[name][column.name] = _mean(noise[name], *theirs)
            excess[name][column.name] = _mean(above[name])
    names = tuple(column.name for column in columns)
    title = "Aggregated noise with estimated weights, in the paper's convention"
    grids = (
        Grid("estimated", title, names, rows, 2, about.tolerance, relative=True),
        Grid("excess", "The same over the oracle's noise (1 is perfect)", names, excess, 4),
    )
    worst = max(cell.ours for cell in excess["RobustHDP"].values())
    claim = Claim(
        "Robust-HDP is all but optimal in the noise that it aggregates",
        worst < 1.05,
        f"at most {worst:.4f} times the oracle's noise; the paper's own figures: at most "
        f"{max(paper['RobustHDP'][c][0] / paper['Oracle'][c][0] for c in names):.4f}",
    )
    figures = {
        "estimated-noise": grid_figure(grids[0], "sum w² σ² / (p η²), log scale", log_y=True)
    }
    return Outcome(grids, (claim,), figures, notes=tuple(about.notes), effort=effort)


def submatrix_rows(artefact: Artefact, wishes: Wishes, store: Path) -> Outcome:
    """Precision of the weights over p', for the paper's sub-matrix and for a random sample."""
    column, *others = make_columns(artefact, replace(wishes, methods=("RobustHDP",)))
    if others:
        raise InvalidValueError("--dists", wishes.columns, f"{artefact.name} shows one at a time")
    kinds: dict[str, dict[int, list[float]]] = {"first p' rows (paper)": {}, "random rows": {}}
    effort = Effort()
    for seed in _seeds([column]):
        first = _first_round(column, seed, store, wishes.workers)
        effort += first.effort
        for rows in (r for r in artefact.about.options["rows"] if r <= len(first.updates)):
            estimators = (PCP(submatrix_rows=rows, submatrices=1), PCP(sample=rows))
            for kind, estimator in zip(kinds, estimators, strict=True):
                w = inverse_variance_weights(estimator.estimate(first.updates).variance)
                kinds[kind].setdefault(rows, []).append(excess_noise(w, first.truth))
    sizes = sorted(next(iter(kinds.values())))
    names = tuple(f"{size:,}" for size in sizes)
    rows_of = {
        kind: {name: _mean(found[size]) for name, size in zip(names, sizes, strict=True)}
        for kind, found in kinds.items()
    }
    mine = [cell.ours for cell in rows_of["first p' rows (paper)"].values()]
    claims = (
        Claim(
            "weights get more precise when p' grows",
            mine[-1] < mine[0],
            f"excess noise {mine[0] - 1:.2%} at p' = {names[0]}, {mine[-1] - 1:.2%} at {names[-1]}",
        ),
    )
    lines = {
        k: Line(sizes, [max(c.ours - 1, 1e-9) for c in r.values()]) for k, r in rows_of.items()
    }
    figure = lines_figure(
        lines,
        "rows p' of the sub-matrix (log scale)",
        "noise over the oracle's, minus 1 (log scale)",
        log_x=True,
        log_y=True,
    )
    title = "Noise of the aggregate over the oracle's, by p'"
    grid = Grid("submatrix-rows", title, names, rows_of, 5)
    figures = {"submatrix-rows": figure}
    return Outcome((grid,), claims, figures, notes=tuple(artefact.about.notes), effort=effort)
