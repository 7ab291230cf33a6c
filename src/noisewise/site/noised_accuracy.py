"""The one figure that a site may give out beside its updates: a noised accuracy, and its price.

What leaves is the number of records that the model gets right plus N(0, z^2), rounded to a whole
number and divided by a number from the site's own file. One record changes the first term by at
most 1, so this is a Gaussian mechanism of noise multiplier z without any sampling. The ledger
charges it to the same budget as training, as if every record were trained on and held out at once.
"""

from __future__ import annotations

import json
import logging

from noisewise.errors import InvalidValueError
from noisewise.privacy.ledger import SealedReply, metrics_charge
from noisewise.randomness import SecureRandom
from noisewise.site.instruction import CheckedQuestion
from noisewise.site.site_file import Site
from noisewise.training.correct_count import Answers
from noisewise.training.parameters import ParameterLayout

__all__ = ["noised_accuracy"]

_log = logging.getLogger("noisewise.site")


def noised_accuracy(site: Site, question: CheckedQuestion) -> float:
    """Reserve, count, add noise, seal: the figure as the ledger stored it.

    Args:
        site: whose held-out records and ledger are used.
        question: within the site's limits.

    Raises:
        InvalidValueError: the site has not opted in, or the held-out records cannot be read.
        LedgerError: the budget or the number of releases is spent, or the ledger cannot be trusted.
    """
    part = site.config.metrics
    if part is None:
        allowed = "a request to evaluate was refused"
        raise InvalidValueError("[metrics]", "not in the site's file", allowed)
    digest = question.digest(ParameterLayout.of(site.model), part)
    data = site.held_out()  # before the ledger is charged: a missing file must cost nothing
    with site.open_ledger() as ledger:
        charge = metrics_charge(part.noise_multiplier)
        granted = ledger.reserve(digest, charge, at_most=part.releases)
        if isinstance(granted, SealedReply):
            _log.info(
                "round %d was asked about before: the stored accuracy is sent again; no budget is "
                "charged",
                question.round,
            )
            return _decode(granted.reply)
        right = Answers(site.model).count_right(question.theta, data)
        noise = part.noise_multiplier * float(SecureRandom().normal(0, 1)[0])
        # To whole records: the lowest bits of a sum tell which count the noise was added to.
        figure = round(right + noise) / part.records
        return _decode(ledger.seal(granted, json.dumps({"noised_accuracy": figure}).encode()))


def _decode(reply: bytes) -> float:
    """The figure of a stored reply; ledgers on disk have it under another spelling of its name."""
    [figure] = json.loads(reply).values()
    return float(figure)
