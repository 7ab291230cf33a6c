"""The ledger of one dataset: its budget, what is charged, what left the site.

A client uses it like this::

    ledger = Ledger.open(path, dataset_id=..., budget=...)
    granted = ledger.reserve(instruction_hash(instruction), plan)  # charges the round
    if isinstance(granted, SealedReply):
        return granted.reply  # the same instruction again: the same bytes, no charge
    return ledger.seal(granted, train_and_encode())  # stores the reply durably, then returns it

| file | contents |
|---|---|
| `charges` | what a round costs |
| `chain` | entries, and the hashes that connect them |
| `store` | the entries in an SQLite file |
| `ledger_schema` | the tables of that file, and the upgrade of older files |
| `witness` | a second file that detects an older copy of the first |
| `book` | the `Ledger` itself |
| `statement` | the statement for a privacy officer, and `verify_ledger` |
| `signature` | the site's signature over a statement |
| `refusals` | why the site did not take part |
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
