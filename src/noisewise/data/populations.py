"""Populations: epsilon, batch size and delta of every client, drawn anew or by the authors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from noisewise.checks import non_negative_int, positive_int, positive_number
from noisewise.data.partition import ClientData
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.randomness import keyed_generator
from noisewise.text import align_columns

__all__ = [
    "DISTRIBUTIONS",
    "AuthorsDraw",
    "NormalMixture",
    "Uniform",
    "authors_population",
    "make_specs",
    "population_table",
    "sample_batch_sizes",
    "sample_epsilons",
]

MIN_EPSILON = 0.15  # the smallest epsilon among the authors' draws


@dataclass(frozen=True)
class NormalMixture:
    """A mixture of normals: weights, means and standard deviations, one for each component."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return n draws; they can be negative."""
        component = rng.choice(len(self.weights), size=n, p=self.weights)
        return rng.normal(np.asarray(self.means)[component], np.asarray(self.deviations)[component])


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution on [low, high]."""

    low: float
    high: float

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return n draws."""
        return rng.uniform(self.low, self.high, size=n)


# The paper's table "Distributions of privacy parameters". It writes N(mean, s); the authors' draws
# show that s is the standard deviation (Dist2's small component: .18 to .21 around .2 with s .01).
DISTRIBUTIONS: dict[str, NormalMixture | Uniform] = {
    "Dist1": NormalMixture((1.0,), (2.0,), (1.0,)),
    "Dist2": NormalMixture((0.2, 0.6, 0.2), (0.2, 1.0, 5.0), (0.01, 0.1, 1.0)),
    "Dist3": Uniform(0.2, 5.0),
    "Dist4": NormalMixture((0.2, 0.6, 0.2), (0.2, 0.5, 2.0), (0.01, 0.1, 1.0)),
    "Dist5": Uniform(0.2, 2.0),
    "Dist6": NormalMixture((0.3, 0.5, 0.2), (0.2, 0.5, 1.0), (0.01, 0.1, 0.1)),
    "Dist7": Uniform(0.2, 1.0),
    "Dist8": NormalMixture((0.6, 0.4), (0.2, 0.5), (0.01, 0.1)),
    "Dist9": Uniform(0.2, 0.5),
}


@dataclass(frozen=True)
class AuthorsDraw:
    """What the paper's authors drew once for all their experiments.

    Args:
        epsilons: one for each client.
        batch_sizes: one for each client, shared by all distributions.
        delta: the same for every client.
    """

    epsilons: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    delta: float


@cache
def _authors() -> dict[str, Any]:
    text = files("noisewise.data").joinpath("populations.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def authors_population(dist: str, n_clients: int, scale: float = 1.0) -> AuthorsDraw:
    """Return the authors' own draw of epsilons and batch sizes.

    Args:
        dist: ``"Dist1"`` .. ``"Dist9"``.
        n_clients: 20, 40 or 60.
        scale: multiplies every epsilon; the paper uses 10 for CIFAR-100.

    Example:
        >>> authors_population("Dist1", 20).epsilons[:3]
        (2.81, 1.69, 1.74)
    """
    _check_dist(dist)
    positive_int("n_clients", n_clients)
    positive_number("scale", scale)
    drawn = _authors()
    if str(n_clients) not in drawn["batch_sizes"]:
        raise InvalidValueError(
            "n_clients",
            n_clients,
            "the authors drew for 20, 40 and 60 clients; use sample_epsilons for other numbers",
        )
    return AuthorsDraw(
        epsilons=tuple(float(e) * scale for e in drawn["epsilons"][dist][str(n_clients)]),
        batch_sizes=tuple(int(b) for b in drawn["batch_sizes"][str(n_clients)]),
        delta=float(drawn["delta"]),
    )


def sample_epsilons(
    dist: str, n_clients: int, seed: int, minimum: float = MIN_EPSILON, scale: float = 1.0
) -> tuple[float, ...]:
    """Draw epsilons from one of the paper's distributions.

    Args:
        dist: ``"Dist1"`` .. ``"Dist9"``.
        n_clients: how many to draw.
        seed: the same seed gives the same draw.
        minimum: smaller draws (normals reach below 0) are raised to this; the default is the
            smallest epsilon that the authors drew.
        scale: multiplies the result, after the minimum; the paper uses 10 for CIFAR-100.
    """
    _check_dist(dist)
    positive_int("n_clients", n_clients)
    positive_number("minimum", minimum)
    positive_number("scale", scale)
    draws = DISTRIBUTIONS[dist].sample(
        n_clients, keyed_generator(non_negative_int("seed", seed), "epsilons")
    )
    return tuple(float(e) for e in np.maximum(draws, minimum) * scale)


def sample_batch_sizes(
    n_clients: int, seed: int, choices: Sequence[int] = (16, 32, 64, 128)
) -> tuple[int, ...]:
    """Draw a batch size for each client, every choice equally likely.

    Args:
        n_clients: how many to draw.
        seed: the same seed gives the same draw.
        choices: whole numbers >= 1; a single one gives all clients the same batch size.
    """
    positive_int("n_clients", n_clients)
    if not choices:
        raise InvalidValueError("choices", choices, "must hold at least one batch size")
    for choice in choices:
        positive_int("choices", choice)
    rng = keyed_generator(non_negative_int("seed", seed), "batch sizes")
    picks = rng.integers(len(choices), size=n_clients)
    return tuple(int(choices[pick]) for pick in picks)


def make_specs(
    clients: Sequence[ClientData],
    *,
    epsilons: float | Sequence[float],
    batch_sizes: int | Sequence[int],
    delta: float | Sequence[float],
    local_epochs: int | Sequence[int] = 1,
    ids: Sequence[str] | None = None,
) -> tuple[ClientSpec, ...]:
    """Make one `ClientSpec` for each client; N_i is the number of its training records.

    Each setting is one value for all clients or one for each.

    Args:
        clients: what they hold.
        epsilons: privacy budgets.
        batch_sizes: expected batches.
        delta: delta of the budgets.
        local_epochs: passes over the data in a round.
        ids: names of the clients; None for ``client-00``, ``client-01``, ...

    Returns:
        The specs, in the order of ``clients``.
    """
    n = positive_int("number of clients", len(clients))
    width = max(2, len(str(n - 1)))
    names = [f"client-{number:0{width}d}" for number in range(n)] if ids is None else list(ids)
    if len(names) != n or len(set(names)) != n:
        raise InvalidValueError("ids", names, f"must be {n} different names")
    table = {
        "epsilon": _spread("epsilons", epsilons, n),
        "batch_size": _spread("batch_sizes", batch_sizes, n),
        "delta": _spread("delta", delta, n),
        "local_epochs": _spread("local_epochs", local_epochs, n),
    }
    return tuple(
        ClientSpec(
            id=names[number],
            n_examples=len(client.train),
            **{field: values[number] for field, values in table.items()},
        )
        for number, client in enumerate(clients)
    )


def population_table(specs: Sequence[ClientSpec]) -> str:
    """Print a population: one line for each client, ready for a terminal.

    Example:
        >>> print(population_table([ClientSpec("client-00", 2400, 32, 0.5, 1e-4)]))
        client        N   b       q  steps  epsilon   delta
        client-00  2400  32  0.0133     75      0.5  0.0001
    """
    rows = [["client", "N", "b", "q", "steps", "epsilon", "delta"]] + [
        [
            spec.id,
            str(spec.n_examples),
            str(spec.batch_size),
            f"{spec.sample_rate:.4f}",
            str(spec.steps_per_round),
            f"{spec.epsilon:.4g}",
            f"{spec.delta:.4g}",
        ]
        for spec in specs
    ]
    return "\n".join(align_columns(rows, right=range(1, len(rows[0]))))


def _spread(field: str, values: Any, n: int) -> list[Any]:
    """One value for each of n clients, as plain Python numbers."""
    if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray)):
        values = [values] * n
    if len(values) != n:
        raise InvalidValueError(field, f"{len(values)} values", f"must be one value or {n}")
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def _check_dist(dist: str) -> None:
    if dist not in DISTRIBUTIONS:
        raise InvalidValueError("dist", dist, f"must be one of {', '.join(DISTRIBUTIONS)}")
