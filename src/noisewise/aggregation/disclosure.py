"""`Disclosure`: what a server may need to know about clients besides their updates."""

from __future__ import annotations

import enum

__all__ = ["Disclosure"]


class Disclosure(enum.Enum):
    """Information about the clients that a server may need besides their updates."""

    EPSILON = "epsilon"
    """The clients' epsilons, as the clients report them."""
    N_EXAMPLES = "n_examples"
    """The clients' numbers of training records."""
    TRUE_VARIANCE = "true_variance"
    """The closed-form noise energy of each update. Clients never disclose it: simulation only."""
