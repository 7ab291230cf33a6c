"""What a method's server must know about clients, in words: one row for each disclosure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Disclosure", "disclosure"]


@dataclass(frozen=True)
class Disclosure:
    """One thing that a server must know.

    Attributes:
        short: for a list inside a sentence.
        reported: in a simulation, where clients report it.
        entered: in a deployment, where the server's operator enters it.
    """

    short: str
    reported: str
    entered: str


_DISCLOSURES: Mapping[str, Disclosure] = {
    "epsilon": Disclosure(
        "budgets",
        "each client's privacy budget, as the client reports it",
        "each site's epsilon, as the server's operator entered it (not checked)",
    ),
    "n_examples": Disclosure(
        "numbers of records",
        "each client's number of training records",
        "each site's number of training records, as the server's operator entered it (not checked)",
    ),
    "true_variance": Disclosure(
        "the true noise",
        "the true noise of each update, which no client should tell: only in simulations",
        "true_variance",
    ),
}


def disclosure(need: str) -> Disclosure:
    """Return the words for an entry of a method's ``needs``; an unknown one is its own words."""
    return _DISCLOSURES.get(need, Disclosure(need, need, need))
