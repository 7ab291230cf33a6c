"""The one figure that a site may give out beside its updates: a noised accuracy, and its price.

What leaves is the number of records that the model gets right plus N(0, z^2), rounded to a whole
number and divided by a number from the site's own file. One record changes the first term by at
most 1, so this is a Gaussian mechanism of noise multiplier z without any sampling. The ledger
charges it to the same budget as training, as if every record were trained on and held out at once.
"""

from __future__ import annotations

import json
import logging

from flwr.app import MetricRecord, RecordDict

from noisewise.errors import InvalidValueError
from noisewise.federation.flower.instruction import Question, read_question
from noisewise.federation.flower.replies import METRICS, NOISED_ACCURACY
from noisewise.federation.flower.site import Site
from noisewise.privacy.ledger import SealedReply, metrics_charge
from noisewise.randomness import SecureRandom
from noisewise.training.answers import Answers
from noisewise.training.parameters import ParameterLayout

__all__ = ["noised_accuracy", "noised_accuracy_content"]

_log = logging.getLogger("noisewise.site")


def noised_accuracy_content(site: Site, asked: RecordDict) -> RecordDict:
    """The content of a reply to a question.

    Raises:
        NoisewiseError: the site gives no metrics, or not this one.
    """
    if site.config.metrics is None:
        raise InvalidValueError(
            "[metrics]", "not in the site's file", "a request to evaluate was refused"
        )
    layout = ParameterLayout.of(site.model)
    question = read_question(asked, layout, site.config.limits)
    figure = noised_accuracy(site, question)
    _log.info("round %d: a noised accuracy is sent", question.round)
    return RecordDict({METRICS: MetricRecord({NOISED_ACCURACY: figure})})


def noised_accuracy(site: Site, question: Question) -> float:
    """Reserve, count, add noise, seal: the figure as the ledger stored it.

    Raises:
        LedgerError: the budget or the number of releases is spent, or the ledger cannot be trusted.
    """
    part = site.config.metrics
    assert part is not None
    digest = question.digest(ParameterLayout.of(site.model), part)
    data = site.held_out()  # before the ledger is asked: a missing file must cost nothing
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
        return _decode(ledger.seal(granted, json.dumps({NOISED_ACCURACY: figure}).encode()))


def _decode(reply: bytes) -> float:
    return float(json.loads(reply)[NOISED_ACCURACY])
