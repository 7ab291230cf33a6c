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
from noisewise.experiments.population import make_population
from noisewise.experiments.prepare import prepare
from noisewise.federation.clients import Client
from noisewise.noise.estimate import Estimator
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.pcp_estimator import PCP
from noisewise.noise.pursuit import principal_component_pursuit
from noisewise.noise.variance import aggregate_noise, common_factor, excess_noise
from noisewise.paper.artefact_runs import Column, Overrides, make_columns, setting_name
from noisewise.paper.artefacts import Artefact
from noisewise.paper.grids import Cell, Grid
from noisewise.paper.noise_table import client_variance
from noisewise.paper.outcome import Claim, Outcome
from noisewise.paper.paper_figures import Line, grid_figure, lines_figure, weights_panels
from noisewise.paper.published import published_table
from noisewise.paper.training_time import TrainingTime, read_update_time, write_update_time
from noisewise.report.estimate_figures import spectrum_figure

__all__ = ["eigenvalues", "estimated_noise", "submatrix_rows", "weights"]

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class FirstRound:
    """The updates of round 1 of a column with one seed, and their true noise.

    Attributes:
        updates: [p, n] what the server received.
        truth: [n] true noise energy of each update.
        clients: the clients that sent the updates.
        training_time: the time of the local training.
    """

    updates: torch.Tensor
    truth: Vector
    clients: tuple[Client, ...]
    training_time: TrainingTime


def _first_round(column: Column, seed: int, store: Path, workers: int) -> FirstRound:
    """Return the updates of Robust-HDP's clients, computed once and kept in the store."""
    job = next(
        (j for j in column.jobs if j.method.name == "RobustHDP" and j.seed == seed), column.jobs[0]
    )
    rate = column.rate_of(job)
    path = store / setting_name(column) / f"updates-{rate:g}-seed{seed}.safetensors"
    if not path.exists():
        start = time.monotonic()
        prepared = prepare(column.config, job.method, seed)
        updates, truth = first_round_updates(prepared, workers=workers)
        save_updates(path, updates, truth)
        training_time = write_update_time(path, time.monotonic() - start)
        return FirstRound(updates, truth, tuple(prepared.clients), training_time)
    arrays, clients = load_file(path), make_population(column.config, seed)
    truth = arrays["true_variance"].numpy()
    return FirstRound(arrays["updates"], truth, clients, read_update_time(path))


def _seeds(columns: Sequence[Column]) -> list[int]:
    return sorted({job.seed for column in columns for job in column.jobs})


@dataclass(frozen=True)
class _ColumnWeights:
    """The part of `weights` for one column."""

    excess: dict[str, Cell]
    claims: tuple[Claim, ...]
    figure: Figure
    data: dict[str, Any]
    training_time: TrainingTime


def weights(artefact: Artefact, overrides: Overrides, store: Path) -> Outcome:
    """Compare the weights of all methods and Robust-HDP's noise estimates with the true noise.

    Clients are ordered by epsilon, as in the paper. The figures show the first seed.
    """
    columns = make_columns(artefact, replace(overrides, methods=("RobustHDP",)))
    pcp = PCP(**artefact.about.options) if artefact.about.options else PCP(sample=None)
    parts = {c.name: _column_weights(c, pcp, store, overrides.workers) for c in columns}
    methods = next(iter(parts.values())).excess
    rows = {m: {name: part.excess[m] for name, part in parts.items()} for m in methods}
    title = "Noise of the aggregate divided by the oracle's (1 is the optimum)"
    single = len(parts) == 1
    return Outcome(
        (Grid("excess", title, tuple(parts), rows, 4),),
        tuple(
            claim if single else replace(claim, text=f"{name}: {claim.text}")
            for name, part in parts.items()
            for claim in part.claims
        ),
        {"weights" if single else f"weights-{name}": part.figure for name, part in parts.items()},
        next(iter(parts.values())).data if single else {n: p.data for n, p in parts.items()},
        (*artefact.about.notes, "PFA has the weights of WeiAvg and adds its projection."),
        training_time=sum((part.training_time for part in parts.values()), TrainingTime()),
    )


def _column_weights(column: Column, pcp: PCP, store: Path, workers: int) -> _ColumnWeights:
    excess: dict[str, list[float]] = {}
    total = TrainingTime()
    first_seed: tuple[tuple[Claim, ...], Figure, dict[str, Any]] | None = None
    for seed in _seeds([column]):
        first = _first_round(column, seed, store, workers)
        total += first.training_time
        estimate = pcp.estimate(first.updates)
        epsilons = np.array([client.spec.epsilon for client in first.clients])
        sizes = np.array([client.spec.n_examples for client in first.clients])
        by_method = {
            "RobustHDP": inverse_variance_weights(estimate.variance),
            "WeiAvg": proportional_weights(epsilons),
            "PFA": proportional_weights(epsilons),
            "DPFedAvg": proportional_weights(sizes),
            "Oracle": inverse_variance_weights(first.truth),
        }
        factor = inverse_variance_weights(Factor().estimate(first.updates).variance)
        for name, w in {**by_method, "RobustHDP with factor": factor}.items():
            excess.setdefault(name, []).append(excess_noise(w, first.truth))
        if first_seed is None:
            batches = np.array([client.spec.batch_size for client in first.clients])
            order = np.lexsort((batches, epsilons))
            figure = weights_panels(
                {name: w[order] for name, w in by_method.items()},
                {"RobustHDP": estimate.variance[order]},
                first.truth[order],
                "clients by rising epsilon (and batch size)",
            )
            claims = _weight_claims(by_method, estimate.variance, first.truth, epsilons, batches)
            if len(epsilons) == 60 and column.name == "Dist1":  # the paper discusses only this one
                claims += _sixty_clients_claims(by_method, epsilons, batches)
            gap = _gap(estimate.details)
            claims += (Claim("the decomposition converged", estimate.converged, gap),)
            data = _client_data(first, order, by_method, estimate.variance, batches)
            first_seed = claims, figure, data
    assert first_seed is not None
    means = {name: _mean(values) for name, values in excess.items()}
    return _ColumnWeights(means, *first_seed, total)


def _gap(details: Mapping[str, Any]) -> str:
    return f"duality gap {details['gap']:.1e} after {details['iterations']} iterations"


def _client_data(
    first: FirstRound,
    order: NDArray[np.intp],
    by_method: Mapping[str, Vector],
    estimate: Vector,
    batches: NDArray[np.int64],
) -> dict[str, Any]:
    """The values behind the figure, client by client."""
    specs, spent = [first.clients[k].spec for k in order], first.training_time
    return {
        "clients": [spec.id for spec in specs],
        "epsilon": [spec.epsilon for spec in specs],
        "batch_size": batches[order].tolist(),
        "weights": {name: w[order].tolist() for name, w in by_method.items()},
        "estimated_variance": estimate[order].tolist(),
        "true_variance": first.truth[order].tolist(),
        "training_seconds": spent.seconds if spent.complete else math.nan,
    }


def _weight_claims(
    by_method: Mapping[str, Vector],
    estimate: Vector,
    truth: Vector,
    epsilons: Vector,
    batches: NDArray[np.int64],
) -> tuple[Claim, ...]:
    """Check the paper's claims about its figures of weights."""
    robust, oracle, by_epsilon = (by_method[name] for name in ("RobustHDP", "Oracle", "WeiAvg"))
    difference = float(np.max(np.abs(robust - oracle)))
    noise = excess_noise(robust, truth)
    factor = common_factor(estimate, truth)
    claims = [
        Claim(
            "Robust-HDP's weights are close to the optimum",
            noise < 1.05,
            f"{noise:.4f} times the oracle's noise; largest difference of a weight "
            f"{100 * difference:.2f} points; the estimates have a common factor {factor:.3f}",
        ),
        Claim(
            "the weights of WeiAvg and PFA are not optimal",
            excess_noise(by_epsilon, truth) > 1.05,
            f"{excess_noise(by_epsilon, truth):.2f} times the oracle's noise",
        ),
    ]
    top = int(np.argmax(robust))
    if len(set(batches.tolist())) > 1:
        claims.append(
            Claim(
                "the client with the largest batch gets the largest weight",
                bool(batches[top] == batches.max()),
                f"batch {batches[top]}, epsilon {epsilons[top]:g}, "
                f"weight {100 * robust[top]:.1f} %",
            )
        )
    return tuple(claims)


def _sixty_clients_claims(
    by_method: Mapping[str, Vector], epsilons: Vector, batches: NDArray[np.int64]
) -> tuple[Claim, ...]:
    """Check the paper's claims about 60 clients under Dist1."""
    robust, oracle = by_method["RobustHDP"], by_method["Oracle"]
    second = int(np.argsort(epsilons, kind="stable")[-2])
    six = float(np.sort(robust)[-6:].sum())
    mixed = len(set(batches.tolist())) > 1
    published = 0.18 if mixed else 0.05
    one_weight = Claim(
        f"the client with the second largest epsilon gets a weight close to {published}",
        bool(abs(robust[second] - published) < 0.02),
        f"{robust[second]:.3f}, oracle {oracle[second]:.3f}",
    )
    if not mixed:
        return (one_weight,)
    return one_weight, Claim("six clients have more than half", six > 0.5, f"{six:.2f}")


def _mean(values: Sequence[float], paper: float = math.nan, deviation: float = math.nan) -> Cell:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Cell(float(np.mean(values)), spread, len(values), paper, deviation)


def eigenvalues(artefact: Artefact, overrides: Overrides, store: Path) -> Outcome:
    """Compute the singular values of the updates M and of their low-rank part L."""
    columns = make_columns(artefact, replace(overrides, seeds=1, methods=("RobustHDP",)))
    figures, data, rows = {}, {}, {}
    claims: list[Claim] = []
    total = TrainingTime()
    for column in columns:
        first = _first_round(column, column.config.seed, store, overrides.workers)
        total += first.training_time
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
    return Outcome((grid,), tuple(claims), figures, data, notes, training_time=total)


def _spectrum_claims(name: str, values: Vector, low: Vector, rank: int) -> list[Claim]:
    """Check the paper's claims about its spectra; adds the energy of L, which it does not give."""
    below_m = int(np.sum(low < 0.01 * values[0]))
    below_l = int(np.sum(low < 0.05 * low[0]))
    energy = float(np.sum(low**2) / np.sum(values**2))
    return [
        Claim(
            f"{name}: most singular values of L are close to 0",
            below_m > len(low) / 2,
            f"{below_m} of {len(low)} below 1 % of M's largest, {below_l} below 5 % of L's own "
            f"largest; L has {energy:.1e} of M's energy",
        ),
        Claim(f"{name}: L is of low rank", rank <= len(low) / 2, f"rank {rank} of {len(low)}"),
    ]


def estimated_noise(artefact: Artefact, overrides: Overrides, store: Path) -> Outcome:
    """Compute the row Robust-HDP of the noise table from the estimates on real updates.

    The noise itself follows the paper's convention.
    """
    about = artefact.about
    columns = make_columns(artefact, replace(overrides, methods=("RobustHDP",)))
    paper = published_table("noise_fmnist_round1")
    estimators: dict[str, Estimator] = {
        "RobustHDP": PCP(sample=None),
        "RobustHDP with factor": Factor(),
        "norm": Norm(),
    }
    rows: dict[str, dict[str, Cell]] = {name: {} for name in estimators}
    excess: dict[str, dict[str, Cell]] = {name: {} for name in estimators}
    total = TrainingTime()
    for column in columns:
        variance = client_variance(authors_population(column.name, column.config.data.n_clients))
        noise: dict[str, list[float]] = {name: [] for name in estimators}
        above: dict[str, list[float]] = {name: [] for name in estimators}
        for seed in _seeds([column]):
            first = _first_round(column, seed, store, overrides.workers)
            total += first.training_time
            for name, estimator in estimators.items():
                w = inverse_variance_weights(estimator.estimate(first.updates).variance)
                noise[name].append(aggregate_noise(w, variance))
                above[name].append(excess_noise(w, variance))
        figure, spread = paper["RobustHDP"][column.name][0], paper["RobustHDP_std"][column.name][0]
        for name in estimators:
            published = (figure, spread) if name == "RobustHDP" else (math.nan, math.nan)
            rows[name][column.name] = _mean(noise[name], *published)
            excess[name][column.name] = _mean(above[name])
    names = tuple(column.name for column in columns)
    title = "Aggregated noise with estimated weights, in the paper's convention"
    grids = (
        Grid("estimated", title, names, rows, 2, about.tolerance, relative=True),
        Grid("excess", "Divided by the oracle's noise (1 is the optimum)", names, excess, 4),
    )
    worst = max(cell.ours for cell in excess["RobustHDP"].values())
    claim = Claim(
        "the noise of Robust-HDP's aggregate is close to the optimum",
        worst < 1.05,
        f"at most {worst:.4f} times the oracle's noise; the paper's own figures: at most "
        f"{max(paper['RobustHDP'][c][0] / paper['Oracle'][c][0] for c in names):.4f}",
    )
    figures = {
        "estimated-noise": grid_figure(grids[0], "sum w² σ² / (p η²), log scale", log_y=True)
    }
    return Outcome(grids, (claim,), figures, notes=tuple(about.notes), training_time=total)


def submatrix_rows(artefact: Artefact, overrides: Overrides, store: Path) -> Outcome:
    """Compute the precision of the weights over p', for the paper's sub-matrix and random rows."""
    column, *others = make_columns(artefact, replace(overrides, methods=("RobustHDP",)))
    if others:
        allowed = f"must be a single name, because {artefact.name} has one column"
        raise InvalidValueError("--dists", overrides.columns, allowed)
    kinds: dict[str, dict[int, list[float]]] = {"first p' rows (paper)": {}, "random rows": {}}
    total = TrainingTime()
    for seed in _seeds([column]):
        first = _first_round(column, seed, store, overrides.workers)
        total += first.training_time
        for rows in (r for r in artefact.about.options["rows"] if r <= len(first.updates)):
            estimators = (PCP(submatrix_rows=rows, submatrices=1), PCP(sample=rows))
            for kind, estimator in zip(kinds, estimators, strict=True):
                w = inverse_variance_weights(estimator.estimate(first.updates).variance)
                kinds[kind].setdefault(rows, []).append(excess_noise(w, first.truth))
    sizes = sorted(next(iter(kinds.values())))
    names = tuple(f"{size:,}" for size in sizes)
    rows_of = {
        kind: {name: _mean(values[size]) for name, size in zip(names, sizes, strict=True)}
        for kind, values in kinds.items()
    }
    first_rows = [cell.ours for cell in rows_of["first p' rows (paper)"].values()]
    claims = (
        Claim(
            "weights get more precise when p' grows",
            first_rows[-1] < first_rows[0],
            f"excess noise {first_rows[0] - 1:.2%} at p' = {names[0]}, "
            f"{first_rows[-1] - 1:.2%} at {names[-1]}",
        ),
    )
    lines = {
        k: Line(sizes, [max(c.ours - 1, 1e-9) for c in r.values()]) for k, r in rows_of.items()
    }
    figure = lines_figure(
        lines,
        "rows p' of the sub-matrix (log scale)",
        "noise divided by the oracle's, minus 1 (log scale)",
        log_x=True,
        log_y=True,
    )
    title = "Noise of the aggregate divided by the oracle's, by p'"
    grid = Grid("submatrix-rows", title, names, rows_of, 5)
    figures = {"submatrix-rows": figure}
    return Outcome((grid,), claims, figures, notes=tuple(artefact.about.notes), training_time=total)
