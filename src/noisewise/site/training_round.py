"""One round at a site: reserve the budget, train with noise, seal the update."""

from __future__ import annotations

import logging

from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from noisewise.privacy.ledger import SealedReply
from noisewise.randomness import SecureRandom
from noisewise.site.instruction import CheckedInstruction
from noisewise.site.site_file import Site
from noisewise.training.engine import IsolatedGradients
from noisewise.training.local import local_update, per_step
from noisewise.training.parameters import ParameterLayout

__all__ = ["RECORDS_TOLERANCE", "noised_update"]

RECORDS_TOLERANCE = 0.1
"""Share by which the number of records may differ from the planned one without a warning."""

_STORED = "delta"  # name of the tensor in the replies that ledgers on disk hold
_log = logging.getLogger("noisewise.site")


def noised_update(site: Site, instruction: CheckedInstruction) -> Tensor:
    """Reserve, train, seal: the noised update [p] as the ledger stored it.

    Batch sizes are chosen on made-up records before a record is read. Records are read before the
    ledger is charged, so a missing file costs nothing.

    Args:
        site: whose plan, records and ledger are used.
        instruction: within the site's limits.

    Raises:
        LedgerError: the budget is spent, or the ledger cannot be trusted.
        InvalidValueError: the records cannot be read.
    """
    layout = ParameterLayout.of(site.model)
    normalise = site.config.training.normalise
    digest = instruction.digest(layout, site.plan, normalise)
    engine = IsolatedGradients(site.model, site.loss)
    engine.prepare(instruction.theta, site.record_form)  # before any record is read
    data = site.data()  # before the ledger is charged
    _warn_of_size(site, len(data))
    with site.open_ledger() as ledger:
        granted = ledger.reserve(digest, site.plan, at_most=site.rounds_allowed)
        if isinstance(granted, SealedReply):
            _log.info(
                "round %d was answered before: the stored reply of an identical instruction is "
                "sent again; no budget is charged",
                instruction.round,
            )
            return decode(granted.reply)[_STORED]
        made = local_update(
            site.model,
            instruction.theta,
            data,
            site.plan,
            instruction.learning_rate,
            site.loss,
            SecureRandom(),
            physical_batch=site.config.training.physical_batch,
            engine=engine,
        )
        delta = per_step(made.delta, site.plan) if normalise else made.delta
        return decode(ledger.seal(granted, encode({_STORED: delta.contiguous()})))[_STORED]


def _warn_of_size(site: Site, found: int) -> None:
    planned = site.config.data.records
    if abs(found - planned) > RECORDS_TOLERANCE * planned:
        _log.warning("data.records = %d in the plan, but there are %d records", planned, found)
