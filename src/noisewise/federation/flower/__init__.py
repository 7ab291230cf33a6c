"""Real federations with Flower: a strategy for the server, a client that guards its own budget.

`records` turns Flower's arrays into parameters and back, `strategy` is the server's transport,
`site` reads a site's own file, `instruction` what a server may ask for, `client` answers it. The
library is an extra: ``pip install 'noisewise[flower]'``. Nothing here is imported by the rest of
the package.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["show_log"]


def show_log() -> None:
    """Let this process print what noisewise logs; Flower sets up its own messages only."""
    logger = logging.getLogger("noisewise")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
