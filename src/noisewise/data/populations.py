"""Populations: epsilon, batch size and delta of every client, sampled or from the authors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from noisewise.checks import non_negative_int, positive_int, positive_number
from noisewise.data.examples import count_units
from noisewise.data.partition import ClientData
from noisewise.data.specs import ClientSpec, Unit
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
    "order_epsilons",
    "population_table",
    "sample_batch_sizes",
    "sample_epsilons",
]

ORDERS = ("small_strict", "large_strict")
MIN_EPSILON = 0.15  # the smallest epsilon of the authors' populations


@dataclass(frozen=True)
class NormalMixture:
    """A mixture of normal distributions: weight, mean and standard deviation of each component."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return n samples; they can be negative."""
        component = rng.choice(len(self.weights), size=n, p=self.weights)
        return rng.normal(np.asarray(self.means)[component], np.asarray(self.deviations)[component])


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution on [low, high]."""

    low: float
    high: float

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return n samples."""
        return rng.uniform(self.low, self.high, size=n)


# The paper's table "Distributions of privacy parameters". It writes N(mean, s); the authors'
# samples show that s is the standard deviation (Dist2's first component: .18 to .21, s = .01).
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
    """The epsilons and batch sizes that the paper's authors sampled once for all experiments.

    Args:
        epsilons: epsilon of each client.
        batch_sizes: batch size of each client; the same for all distributions.
        delta: delta of every client.
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
    """Return the epsilons and batch sizes that the authors sampled.

    Args:
        dist: ``"Dist1"`` .. ``"Dist9"``.
        n_clients: 20, 40 or 60.
        scale: multiplies every epsilon; the paper uses 10 for CIFAR-100.

    Returns:
        The epsilons, batch sizes and delta.

    Raises:
        InvalidValueError: the authors have no such population.

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
            "must be 20, 40 or 60, the authors' numbers; use sample_epsilons for other numbers",
        )
    return AuthorsDraw(
        epsilons=tuple(float(e) * scale for e in drawn["epsilons"][dist][str(n_clients)]),
        batch_sizes=tuple(int(b) for b in drawn["batch_sizes"][str(n_clients)]),
        delta=float(drawn["delta"]),
    )


def sample_epsilons(
    dist: str, n_clients: int, seed: int, minimum: float = MIN_EPSILON, scale: float = 1.0
) -> tuple[float, ...]:
    """Sample epsilons from one of the paper's distributions.

    Args:
        dist: ``"Dist1"`` .. ``"Dist9"``.
        n_clients: number of clients.
        seed: the same seed gives the same epsilons.
        minimum: replaces smaller samples (normal samples can be negative); the default is the
            smallest epsilon of the authors.
        scale: multiplies the result, after the minimum; the paper uses 10 for CIFAR-100.

    Returns:
        One epsilon for each client.
    """
    _check_dist(dist)
    positive_int("n_clients", n_clients)
    positive_number("minimum", minimum)
    positive_number("scale", scale)
    draws = DISTRIBUTIONS[dist].sample(
        n_clients, keyed_generator(non_negative_int("seed", seed), "epsilons")
    )
    return tuple(float(e) for e in np.maximum(draws, minimum) * scale)


def order_epsilons(
    epsilons: Sequence[float], n_records: Sequence[int], order: str
) -> tuple[float, ...]:
    """Give the epsilons to the clients in the order of their numbers of records.

    Args:
        epsilons: one for each client, in any order.
        n_records: number of training records of each client.
        order: ``"small_strict"`` gives the smallest epsilon to the client with the fewest records,
            ``"large_strict"`` to the one with the most.

    Returns:
        The same epsilons, one for each client; equal numbers of records keep the clients' order.

    Example:
        >>> order_epsilons([3.0, 1.0, 2.0], [500, 20, 100], "small_strict")
        (3.0, 1.0, 2.0)
        >>> order_epsilons([3.0, 1.0, 2.0], [500, 20, 100], "large_strict")
        (1.0, 3.0, 2.0)
    """
    if order not in ORDERS:
        raise InvalidValueError("order", order, f"must be one of {', '.join(ORDERS)}")
    if len(epsilons) != len(n_records):
        raise InvalidValueError(
            "epsilons", f"{len(epsilons)} values", f"must be {len(n_records)}, one for each client"
        )
    sizes = np.asarray(n_records)
    clients = np.argsort(sizes if order == "small_strict" else -sizes, kind="stable")
    ordered = dict(zip(clients.tolist(), sorted(map(float, epsilons)), strict=True))
    return tuple(ordered[client] for client in range(len(epsilons)))


def sample_batch_sizes(
    n_clients: int, seed: int, choices: Sequence[int] = (16, 32, 64, 128)
) -> tuple[int, ...]:
    """Sample a batch size for each client; all choices are equally likely.

    Args:
        n_clients: number of clients.
        seed: the same seed gives the same batch sizes.
        choices: whole numbers >= 1; a single one gives all clients the same batch size.

    Returns:
        One batch size for each client.
    """
    positive_int("n_clients", n_clients)
    if not choices:
        raise InvalidValueError("choices", choices, "must have at least one batch size")
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
    unit: Unit = "record",
    max_records: int | None = None,
    ids: Sequence[str] | None = None,
) -> tuple[ClientSpec, ...]:
    """Make one `ClientSpec` for each client; N_i is the number of its training records.

    Each setting is one value for all clients, or a list with one value for each client.

    Args:
        clients: the records of the clients.
        epsilons: epsilon of each client's budget.
        batch_sizes: expected batch sizes.
        delta: delta of the budgets.
        local_epochs: passes over the data in a round.
        unit: what the budgets protect; with "person", N_i is the number of persons.
        max_records: the largest number of a person's records in a step; None for records.
        ids: names of the clients; None for the names of real clients, else ``client-00``,
            ``client-01``, ...

    Returns:
        The specs, in the order of ``clients``.

    Raises:
        InvalidValueError: a list has another length than ``clients``, ids repeat, or a value is not
            allowed (see `ClientSpec`).

    Example:
        >>> from noisewise.data import load_dataset, split_dataset
        >>> clients = split_dataset(load_dataset("digits"), 2)
        >>> specs = make_specs(clients, epsilons=[1.0, 5.0], batch_sizes=32, delta=1e-4)
        >>> [(spec.id, spec.epsilon, spec.batch_size) for spec in specs]
        [('client-00', 1.0, 32), ('client-01', 5.0, 32)]
    """
    n = positive_int("number of clients", len(clients))
    width = max(2, len(str(n - 1)))
    names = [client.name or f"client-{number:0{width}d}" for number, client in enumerate(clients)]
    names = names if ids is None else list(ids)
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
            n_examples=count_units(client.train, unit),
            unit=unit,
            max_records=max_records,
            **{field: values[number] for field, values in table.items()},
        )
        for number, client in enumerate(clients)
    )


def population_table(specs: Sequence[ClientSpec]) -> str:
    """Return a population as an aligned table with one line for each client.

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
    """Return one value for each of n clients, as plain Python numbers."""
    if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray)):
        values = [values] * n
    if len(values) != n:
        raise InvalidValueError(field, f"{len(values)} values", f"must be one value or {n} values")
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def _check_dist(dist: str) -> None:
    if dist not in DISTRIBUTIONS:
        raise InvalidValueError("dist", dist, f"must be one of {', '.join(DISTRIBUTIONS)}")
