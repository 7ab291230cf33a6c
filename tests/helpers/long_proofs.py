"""Whether long proofs run in full: `make proofs` sets the variable, CI runs their shorter form."""

from __future__ import annotations

import os

LONG_PROOFS = os.environ.get("NOISEWISE_LONG_PROOFS") == "yes"
