"""One round at a site: reserve the budget, train with noise, seal the update."""

from __future__ import annotations

import logging
from dataclasses import replace

from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from noisewise.privacy.ledger import SealedReply, training_charge
from noisewise.randomness import SecureRandom
from noisewise.site.instruction import CheckedInstruction
from noisewise.site.log_limit import CHARGED
from noisewise.site.site_file import Site
from noisewise.training.gradients import GradientEngine
from noisewise.training.local import TensorData, local_update, per_step
from noisewise.training.parameters import ParameterLayout

__all__ = ["RECORDS_TOLERANCE", "noised_update"]

RECORDS_TOLERANCE = 0.1
"""Share by which the number of records may differ from the planned one without a warning."""

_STORED = "delta"  # name of the tensor in the replies that ledgers on disk hold
_log = logging.getLogger("noisewise.site")


def noised_update(site: Site, instruction: CheckedInstruction) -> Tensor:
    """Reserve, train, seal: the noised update [p] as the ledger stored it.

    Batch sizes are chosen on synthetic records before a record is read. Records are read before the
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
    engine = site.engine()
    engine.prepare(instruction.theta, site.record_form)  # before any record is read
    data = site.data()  # before the ledger is charged
    _warn_of_size(site, data)
    with site.open_ledger() as ledger:
        limit, charge = site.round_limit, training_charge(site.plan)
        charge = replace(charge, federation=site.federation)
        granted = ledger.reserve(
            digest, charge, at_most=limit.at_most, counted=limit.counted,
            at_most_in_all=limit.at_most_in_all,
        )  # fmt: skip
        if isinstance(granted, SealedReply):
            _log.info(
                "round %d was answered before: the stored reply of an identical instruction is "
                "sent again; no budget is charged",
                instruction.round,
            )
            return decode(granted.reply)[_STORED]
        _log.info("round %d is charged to the ledger", instruction.round, extra=CHARGED)
        try:
            delta = _trained(site, instruction, data, engine)
        except Exception:
            # The budget is reserved. A missing reply would tell the server that training failed on
            # these records, so the reply has the same form and contains only noise.
            _log.exception(
                "round %d: training failed; the update is only noise",
                instruction.round,
                extra=CHARGED,
            )
            delta = _trained(site, instruction, data.without_records(), engine)
        delta = per_step(delta, site.plan) if normalise else delta
        return decode(ledger.seal(granted, encode({_STORED: delta.contiguous()})))[_STORED]


def _trained(
    site: Site, instruction: CheckedInstruction, data: TensorData, engine: GradientEngine
) -> Tensor:
    return local_update(
        site.model,
        instruction.theta,
        data,
        site.plan,
        instruction.learning_rate,
        site.loss,
        SecureRandom(),
        physical_batch=site.config.training.physical_batch,
        engine=engine,
    ).delta


def _warn_of_size(site: Site, data: TensorData) -> None:
    planned, usable, unit = site.config.declared_units, data.count(site.plan.unit), site.plan.unit
    if abs(usable - planned) > RECORDS_TOLERANCE * planned:
        text = "data.%ss = %d in the plan, but there are %d %ss"
        _log.warning(text, unit, planned, usable, unit)
