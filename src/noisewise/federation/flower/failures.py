"""`FailureBook`: which sites sent unusable replies, how often in a row, and who is not asked."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from noisewise.checks import positive_int

__all__ = ["MAX_BAD_REPLIES", "FailureBook"]

MAX_BAD_REPLIES = 3
"""Unusable replies in a row after which a site is not asked again in a run."""

_log = logging.getLogger(__name__)


@dataclass
class FailureBook:
    """Unusable replies of each site, by kind of question.

    Only replies that arrived count: a site that does not answer, or answers that it does not take
    part, is asked again. The book belongs to one server process: after a restart every site is
    asked again.

    Args:
        limit: so many unusable replies in a row, and the site is not asked again.
    """

    limit: int = MAX_BAD_REPLIES
    _in_a_row: dict[tuple[str, int], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        positive_int("max_bad_replies", self.limit)

    def good(self, kind: str, node: int) -> None:
        """Note a usable reply: the site starts anew."""
        self._in_a_row.pop((kind, node), None)

    def bad(self, kind: str, node: int) -> str:
        """Note an unusable reply; returns words to add to its reason, or nothing."""
        count = self._in_a_row.get((kind, node), 0) + 1
        self._in_a_row[kind, node] = count
        if count < self.limit:
            return ""
        _log.error(
            "client %d sent %d unusable replies (%s) in a row: it is not asked again in this run; "
            "restart the server to ask it again",
            node,
            count,
            kind,
        )
        return f"; not asked again in this run, after {count} unusable replies in a row"

    def excluded(self, kind: str) -> frozenset[int]:
        """Sites that are not asked again."""
        return frozenset(
            node
            for (of, node), count in self._in_a_row.items()
            if of == kind and count >= self.limit
        )

    def allowed(self, kind: str, nodes: Iterable[int]) -> list[int]:
        """The nodes that may be asked, in order."""
        excluded = self.excluded(kind)
        return [node for node in nodes if node not in excluded]
