"""Texts for what clients disclose to the server, one for each entry of a method's ``needs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DISCLOSURES", "Disclosure", "disclosure"]


@dataclass(frozen=True)
class Disclosure:
    """The texts of one disclosure.

    Attributes:
        short: for a list inside a sentence.
        reported: for a simulation, in which clients report the value.
        entered: for a deployment, in which the server's operator enters the value.
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
        "the true noise of each update, which no client should disclose; only in simulations",
        "true_variance",
    ),
}


DISCLOSURES = tuple(_DISCLOSURES)
"""The names of all disclosures."""


def disclosure(need: str) -> Disclosure:
    """Return the texts for an entry of ``needs``; for an unknown entry, its own name."""
    return _DISCLOSURES.get(need, Disclosure(need, need, need))
