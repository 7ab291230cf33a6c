"""Real federations with Flower: a strategy for the server, a client that guards its own budget.

`records` turns Flower's arrays into parameters and back, `strategy` is the server's transport,
`site` reads a site's own file, `instruction` what a server may ask for, `client` answers it. The
library is an extra: ``pip install 'noisewise[flower]'``. Nothing here is imported by the rest of
the package.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from noisewise.errors import MissingExtraError

__all__ = ["NoiseAware", "make_client_app", "show_log"]

_PARTS = {"NoiseAware": "strategy", "make_client_app": "client"}


def __getattr__(name: str) -> Any:
    """The parts that need Flower, imported when they are first used."""
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_PARTS[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise MissingExtraError(f"{name} needs Flower: pip install 'noisewise[flower]'") from error


def show_log() -> None:
    """Let this process print what noisewise logs; Flower sets up its own messages only."""
    logger = logging.getLogger("noisewise")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
