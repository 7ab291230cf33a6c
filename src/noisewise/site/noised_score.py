"""The noised score, the only result besides updates that a site may send, and its privacy cost.

What leaves is the sum of the records' scores, each from 0 to 1, plus N(0, z^2), rounded to a whole
number and divided by a number from the site's own file. A classification scores 1 for each record
that the model gets right; `noisewise.training.bounded_scores` has the other tasks. One record
changes the sum by at most 1, so this is a Gaussian mechanism of noise multiplier z without any
sampling. The ledger charges it to the same budget as training, as if every record were trained on
and held out at once. If the budget protects persons, one record of each person is scored, chosen at
random for each question, so all records of a person change the sum by at most 1.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from noisewise.errors import InvalidValueError
from noisewise.privacy.ledger import SealedReply, metrics_charge
from noisewise.randomness import SecureRandom
from noisewise.site.instruction import CheckedQuestion
from noisewise.site.log_limit import CHARGED
from noisewise.site.site_file import Site
from noisewise.site.site_persons import one_record_each
from noisewise.training.bounded_scores import SCORE_UNITS
from noisewise.training.parameters import ParameterLayout
from noisewise.training.score_sum import Answers

__all__ = ["noised_score"]

_log = logging.getLogger("noisewise.site")


def noised_score(site: Site, question: CheckedQuestion) -> float:
    """Reserve budget, sum the scores, add noise and seal; return the score that was stored.

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
        charge = replace(metrics_charge(part.noise_multiplier), federation=site.federation)
        granted = ledger.reserve(digest, charge, at_most=part.releases)
        if isinstance(granted, SealedReply):
            _log.info(
                "round %d was scored before: the stored score is sent again; no budget is charged",
                question.round,
            )
            return _decode(granted.reply)
        _log.info("the score of round %d is charged", question.round, extra=CHARGED)
        if site.plan.unit == "person":
            data = one_record_each(data, SecureRandom())
        total = Answers(site.model).score_sum(question.theta, data, site.score)
        noise = part.noise_multiplier * float(SecureRandom().normal(0, 1)[0])
        # To whole records: the lowest bits of a sum tell which score the noise was added to.
        figure = round(total / SCORE_UNITS + noise) / part.records
        return _decode(ledger.seal(granted, json.dumps({"noised_accuracy": figure}).encode()))


def _decode(reply: bytes) -> float:
    """The figure of a stored reply; ledgers on disk have it under another spelling of its name."""
    [figure] = json.loads(reply).values()
    return float(figure)
