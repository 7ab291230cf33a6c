"""The three requests that a transport may pass to a site, and the one refusal.

Each function returns what may leave the site, or None for a refusal: the server learns no reason.
No exception leaves, because a transport would send its text to the server. The reason goes to the
site's log, and for training and metrics to a file next to the ledger (`noisewise ledger why`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from noisewise.errors import NoisewiseError
from noisewise.privacy.declaration import Declaration
from noisewise.privacy.ledger import note_refusal
from noisewise.site.instruction import check_instruction, check_question
from noisewise.site.noised_score import noised_score
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_declaration import site_declaration
from noisewise.site.site_file import Site, load_site
from noisewise.site.training_round import noised_update
from noisewise.training.parameters import ParameterLayout

__all__ = ["answer_declaration", "answer_instruction", "answer_question"]

T = TypeVar("T")

FindSite = Callable[[], "Path | Site"]
"""Returns the path of a site's own file, or the site that a vault keeps loaded."""

_LARGEST_ROUND = 2**31
_log = logging.getLogger("noisewise.site")


def answer_instruction(
    find_site: FindSite,
    read: Callable[[], Instruction],
    asked_round: object = None,
) -> dict[str, NDArray[np.float32]] | None:
    """Train one round.

    Args:
        find_site: returns the path of the site's own file, or the loaded site. No server may have a
            say in it.
        read: decodes the server's message; what it raises is a refusal like any other.
        asked_round: that the message names, for the note of a refusal.

    Returns:
        The noised update by the names of the model's parameters, or None.
    """

    def update(site: Site) -> dict[str, NDArray[np.float32]]:
        layout = ParameterLayout.of(site.model)
        instruction = check_instruction(read(), layout, site.config.limits)
        delta = noised_update(site, instruction)
        _log.info("round %d: a noised update is sent", instruction.round)
        return {name: part.numpy() for name, part in layout.unflatten(delta).items()}

    return _answer_or_note(find_site, update, asked_round)


def answer_question(
    find_site: FindSite,
    read: Callable[[], Question],
    asked_round: object = None,
) -> float | None:
    """Measure the noised score of parameters on held-out records, if the site opted in.

    Args:
        find_site: see `answer_instruction`.
        read: decodes the server's message.
        asked_round: see `answer_instruction`.

    Returns:
        The noised score, or None.
    """

    def figure(site: Site) -> float:
        layout = ParameterLayout.of(site.model)
        question = check_question(read(), layout, site.config.limits)
        score = noised_score(site, question)
        _log.info("round %d: a noised score is sent", question.round)
        return score

    return _answer_or_note(find_site, figure, asked_round)


def answer_declaration(find_site: FindSite) -> Declaration | None:
    """Declare the site's unit and budget, if the site opted in.

    Args:
        find_site: see `answer_instruction`.

    Returns:
        The declaration, or None.
    """
    try:
        declared = site_declaration(_loaded(find_site()))
    except Exception as error:
        _log_error("no declaration is sent", error)
        return None
    if declared is None:
        _log.info(
            "a server's request for this site's declaration was refused: set publish = true in "
            "[declaration] of the site's file to send unit, epsilon and delta"
        )
    else:
        _log.info("a declaration is sent: %s", declared)
    return declared


def _answer_or_note(
    find_site: FindSite, answer: Callable[[Site], T], asked_round: object
) -> T | None:
    """The site's answer; None after any error, which is logged and noted.

    The note is next to the ledger, or next to the site's file if that cannot be read.
    """
    notes: Path | None = None
    try:
        site_or_file = find_site()
        notes = site_or_file if isinstance(site_or_file, Path) else None
        site = _loaded(site_or_file)
        notes = site.ledger_file
        return answer(site)
    except Exception as error:
        _log_error("not taking part", error)
        if notes is not None:
            note_refusal(notes, error, round_number=_usable_round(asked_round))
        return None


def _loaded(site_or_file: Path | Site) -> Site:
    return site_or_file if isinstance(site_or_file, Site) else load_site(site_or_file)


def _usable_round(round_number: object) -> int | None:
    return (
        round_number if type(round_number) is int and abs(round_number) < _LARGEST_ROUND else None
    )


def _log_error(refusal: str, error: Exception) -> None:
    if isinstance(error, NoisewiseError):
        _log.error("%s: %s", refusal, error)
    else:
        _log.exception("%s: an error of this software or of this machine", refusal)
