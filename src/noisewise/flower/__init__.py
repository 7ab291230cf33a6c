"""Real federations with Flower: transport only, between a server's run and `noisewise.site`.

`wire` defines the messages: names of records and keys, types, codes, bounds. At a site, `client`
passes messages on, to a vault (`relay`) or to `noisewise.site.interface` (`in_process`), and
`messages` translates them. At the server, `strategy` plays the rounds, `reply_stream` fetches
replies, `collecting` keeps the usable ones, `replies` and `declaration_messages` read them.
`arrays` translates parameters for both, `parameter_records` for the server. `new_app` writes an app
from ``template/``, `new_site` a site from ``site_template/``.

Flower is an extra: ``pip install 'noisewise[flower]'``. Only the command line imports this package,
and no more of it than `new_app`, `new_site` and `relay`, which need no Flower.
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


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what `sys.stderr` is at the time of the message."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """The stream cannot be replaced."""


def show_log() -> None:
    """Let this process print what noisewise logs; Flower sets up its own messages only.

    `NoiseAware` and `make_client_app` call this. It changes nothing if the logger ``noisewise`` has
    a handler or a level already: set one of them first to decide yourself what is printed.
    """
    logger = logging.getLogger("noisewise")
    if not logger.handlers and logger.level == logging.NOTSET:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
