"""`SignalTracker`: estimates how much of the common signal g each client's update carries.

This is needed if clients do not divide their updates by their numbers of local steps. Noise is
independent between clients, so the inner product of two updates of a round is a_i a_j ||g||^2 on
average, where a_i is the signal scale of client i: the loading of a factor model with one factor.
The estimate from one round is too noisy, most of all late in training when g is small. But the
scales follow from the clients' plans and do not change. The tracker therefore sums the products
over all rounds before it computes ratios, and shrinks each ratio towards 1 according to its
remaining error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.noise.blocks import Updates
from noisewise.noise.gram import gram_matrix
from noisewise.noise.update_spread import precisions

__all__ = ["SignalTracker"]

State = Mapping[str, NDArray[Any]]
Vector = NDArray[np.float64]

_COLUMNS = ("product", "common", "noise", "doubt")  # names of the state's arrays
_LEAST = 0.05  # smallest scale
_SIGNIFICANT = 5.0  # scales are estimated once the common signal exceeds 5 standard errors
_ITERATIONS = 50  # about 12 are enough for the authors' populations


@dataclass(frozen=True)
class SignalTracker:
    """Estimates signal scales from products of each update with the mean of the others.

    The mean is weighted by precision, 1 / noise energy.
    """

    def estimate(
        self, updates: Updates, ids: Sequence[str], variance: Vector, state: State
    ) -> tuple[Vector, State]:
        """Add a round's updates to the sums, and estimate the scales of its clients.

        Args:
            updates: [p, n], or a source or iterator of row blocks.
            ids: the n client ids, in the order of the columns.
            variance: [n] noise energies.
            state: the state that the previous round's call returned; an empty mapping for the first
                round. It is not modified.

        Returns:
            [n] scales > 0 with median 1, and the state for the next round. All scales are 1 until
            the common signal is significant.
        """
        gram = gram_matrix(updates)
        precision = precisions(variance)
        by_client = {name: dict(zip(state["ids"], state[name], strict=True)) if state else {}
                     for name in _COLUMNS}  # fmt: skip
        for name, values in _round_terms(gram.matrix, gram.rows, variance, precision).items():
            for client, value in zip(ids, values, strict=True):
                by_client[name][client] = by_client[name].get(client, 0.0) + float(value)
        sums = {name: np.array([by_client[name][client] for client in ids]) for name in _COLUMNS}
        next_state: dict[str, NDArray[Any]] = {
            "ids": np.array(list(by_client["common"]), dtype=np.str_),
            **{name: np.array(list(by_client[name].values())) for name in _COLUMNS},
        }
        return _scales(sums, precision), next_state


def _round_terms(
    gram: NDArray[np.float64], rows: int, variance: Vector, precision: Vector
) -> dict[str, Vector]:
    """Compute the terms that a round adds to the sums, [n] each.

    ``product`` is the product of a client's update with the mean of the others, ``common`` the mean
    product of two clients. ``noise`` and ``doubt`` are the variances of these two that are due to
    noise: the product <n_i, n_j> of two clients' noise has the variance v_i v_j / p.
    """
    n, total = len(variance), precision.sum()
    rest = total - precision
    pairs = total**2 - (precision**2).sum()
    if n < 2 or not (pairs > 0 and np.all(rest > 0)):
        return {name: np.zeros(n) for name in _COLUMNS}
    crossed = gram - np.diag(np.diag(gram))
    weighted_noise = precision**2 * variance
    return {
        "product": crossed @ precision / rest,
        "common": np.full(n, precision @ crossed @ precision / pairs),
        "noise": variance * (weighted_noise.sum() - weighted_noise) / rest**2 / rows,
        "doubt": np.full(n, 2 / (pairs * rows)),
    }


def _scales(sums: Mapping[str, Vector], precision: Vector) -> Vector:
    """Solve for the scales a_i ([n]).

    The ratio ``product`` / ``common`` is a_i times the mean of the other clients' a_j, divided by
    the mean of a_i a_j over all pairs.
    """
    common = sums["common"]
    others_known = precision.sum() - precision > 0
    if not (np.all(others_known) and np.all(common > _SIGNIFICANT * np.sqrt(sums["doubt"]))):
        return np.ones(len(common))
    ratio = sums["product"] / common
    error = sums["noise"] / common**2
    ratio = np.maximum(1 + (ratio - 1) / (1 + error), _LEAST)
    total, a = precision.sum(), np.ones(len(ratio))
    for _ in range(_ITERATIONS):
        part = precision * a
        others = (part.sum() - part) / (total - precision)
        pairs = (part.sum() ** 2 - (part**2).sum()) / (total**2 - (precision**2).sum())
        a = np.sqrt(a * ratio * pairs / others)  # damped: the plain fixed-point step can oscillate
    return np.asarray(np.maximum(a / np.median(a), _LEAST))
