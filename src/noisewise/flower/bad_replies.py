"""`BadReplies`: counts the unusable replies of each site; a site with too many is not asked."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from noisewise.checks import positive_int

__all__ = ["MAX_BAD_REPLIES", "BadReplies"]

MAX_BAD_REPLIES = 3
"""Number of unusable replies in a row after which a site is not asked again in a run."""

_log = logging.getLogger(__name__)


@dataclass
class BadReplies:
    """Counts unusable replies of each site, by kind of message.

    Only replies that arrived count: a site that does not answer, or answers that it does not take
    part, is asked again. The counts belong to one server process: after a restart every site is
    asked again.

    Args:
        limit: number of unusable replies in a row after which a site is not asked again.

    Raises:
        InvalidValueError: the limit is not a positive integer.
    """

    limit: int = MAX_BAD_REPLIES
    _in_a_row: dict[tuple[str, int], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        positive_int("max_bad_replies", self.limit)

    def reset(self, kind: str, node: int) -> None:
        """Set the count of a site to 0, after a usable reply."""
        self._in_a_row.pop((kind, node), None)

    def count(self, kind: str, node: int) -> str:
        """Count an unusable reply; returns text to append to its reason, empty below the limit."""
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
        """The sites that are not asked again."""
        return frozenset(
            node
            for (counted, node), count in self._in_a_row.items()
            if counted == kind and count >= self.limit
        )

    def allowed(self, kind: str, nodes: Iterable[int]) -> list[int]:
        """The nodes that may be asked, in order."""
        excluded = self.excluded(kind)
        return [node for node in nodes if node not in excluded]
