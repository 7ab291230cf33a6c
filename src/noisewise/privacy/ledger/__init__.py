"""The ledger of one dataset: what was promised, what is charged, what left the site.

A client needs four lines::

    ledger = Ledger.open(path, dataset_id=..., budget=...)
    granted = ledger.reserve(instruction_hash(instruction), plan)  # charged from here on
    if isinstance(granted, SealedReply):
        return granted.reply  # the same instruction again: the same bytes, nothing charged
    return ledger.seal(granted, train_and_encode())  # stored durably, then returned

`charges` says what a round costs, `chain` what an entry is and how entries hang together, `store`
how they lie on disk, `witness` notices a database that went back in time, `book` is the `Ledger`
itself, `statement` what a privacy officer reads and `refusals` why the site did not take part.
"""

from noisewise.privacy.ledger.book import Ledger, Reservation, SealedReply
from noisewise.privacy.ledger.charges import (
    Charge,
    dataset_fingerprint,
    instruction_hash,
    metrics_charge,
    training_charge,
)
from noisewise.privacy.ledger.refusals import Refusal, note_refusal, read_refusals
from noisewise.privacy.ledger.statement import Entry, Statement, Verification, verify_ledger

__all__ = [
    "Charge",
    "Entry",
    "Ledger",
    "Refusal",
    "Reservation",
    "SealedReply",
    "Statement",
    "Verification",
    "dataset_fingerprint",
    "instruction_hash",
    "metrics_charge",
    "note_refusal",
    "read_refusals",
    "training_charge",
    "verify_ledger",
]
