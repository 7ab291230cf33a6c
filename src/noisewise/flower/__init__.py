"""Real federations with Flower: transport only, between a server's run and `noisewise.site`.

`wire` defines the messages: names of records and keys, types, codes, bounds. At a site, `client`
passes messages on to `noisewise.site.interface`, and `messages` translates them. At the server,
`strategy` plays the rounds, `reply_stream` fetches replies, `collecting` keeps the usable ones,
`replies` and `declaration_messages` read them. `arrays` translates parameters for both, `new_app`
writes an app from ``template/``.

Flower is an extra: ``pip install 'noisewise[flower]'``. Only the command line imports this package,
and no more of it than `new_app`.
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
