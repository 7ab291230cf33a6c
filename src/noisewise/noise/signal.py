"""How much of the common signal each update carries, where clients do not divide by their steps.

Noise is independent between clients, so what an update has in common with the others of its round
is signal: <d_i, d_j> is a_i a_j ||g||^2 on average. These are the loadings of a factor model with
one factor. A round is too noisy to tell them, above all late in training when g is small. But they
follow from the clients' plans and stay, so products are summed over all rounds before any ratio is
taken, and what is left of doubt pulls an estimate towards 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.noise.blocks import Updates
from noisewise.noise.gram import gram_matrix
from noisewise.noise.spread import precisions

__all__ = ["SignalTracker"]

State = Mapping[str, NDArray[Any]]
Vector = NDArray[np.float64]

_COLUMNS = ("product", "common", "noise", "doubt")
_LEAST = 0.05  # of the average signal
_SURE = 5.0  # standard errors that the common signal needs before anything is said of its shares
_SOLVING = 50  # iterations; a dozen do for the authors' populations


@dataclass(frozen=True)
class SignalTracker:
    """Signal scales from products with the average of the others, precision-weighted."""

    def estimate(
        self, updates: Updates, ids: Sequence[str], variance: Vector, state: State
    ) -> tuple[Vector, State]:
        """Learn from a round.

        Args:
            updates: [p, n].
            ids: the n clients, in the order of the columns.
            variance: [n] noise energy of each update.
            state: what the last call returned; empty at first. It is not modified.

        Returns:
            [n] scales > 0 with a median of 1 (all 1 while nothing is known), and the next state.
        """
        gram = gram_matrix(updates)
        precision = precisions(variance)
        known = {name: dict(zip(state["ids"], state[name], strict=True)) if state else {}
                 for name in _COLUMNS}  # fmt: skip
        for name, values in _of_round(gram.matrix, gram.rows, variance, precision).items():
            for client, value in zip(ids, values, strict=True):
                known[name][client] = known[name].get(client, 0.0) + float(value)
        sums = {name: np.array([known[name][client] for client in ids]) for name in _COLUMNS}
        following: dict[str, NDArray[Any]] = {
            "ids": np.array(list(known["common"]), dtype=np.str_),
            **{name: np.array(list(known[name].values())) for name in _COLUMNS},
        }
        return _scales(sums, precision), following


def _of_round(
    gram: NDArray[np.float64], rows: int, variance: Vector, precision: Vector
) -> dict[str, Vector]:
    """For each client its product with the others' average, the average product of two clients,
    and the variances of both by noise: <n_i, n_j> has v_i v_j / p.
    """
    n, total = len(variance), precision.sum()
    rest = total - precision
    pairs = total**2 - (precision**2).sum()
    if n < 2 or not (pairs > 0 and np.all(rest > 0)):
        return {name: np.zeros(n) for name in _COLUMNS}
    crossed = gram - np.diag(np.diag(gram))
    loud = precision**2 * variance
    return {
        "product": crossed @ precision / rest,
        "common": np.full(n, precision @ crossed @ precision / pairs),
        "noise": variance * (loud.sum() - loud) / rest**2 / rows,
        "doubt": np.full(n, 2 / (pairs * rows)),
    }


def _scales(sums: Mapping[str, Vector], precision: Vector) -> Vector:
    """a_i from a_i times the others' average a, over the average a_i a_j of all pairs."""
    common = sums["common"]
    others_known = precision.sum() - precision > 0
    if not (np.all(others_known) and np.all(common > _SURE * np.sqrt(sums["doubt"]))):
        return np.ones(len(common))
    ratio = sums["product"] / common
    error = sums["noise"] / common**2
    ratio = np.maximum(1 + (ratio - 1) / (1 + error), _LEAST)
    total, a = precision.sum(), np.ones(len(ratio))
    for _ in range(_SOLVING):
        part = precision * a
        others = (part.sum() - part) / (total - precision)
        pairs = (part.sum() ** 2 - (part**2).sum()) / (total**2 - (precision**2).sum())
        a = np.sqrt(a * ratio * pairs / others)  # halfway: the plain step can swing
    return np.asarray(np.maximum(a / np.median(a), _LEAST))
