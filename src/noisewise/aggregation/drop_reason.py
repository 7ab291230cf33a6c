"""`DropReason`: why an update was not used, and its kind, which decides the advice."""

from __future__ import annotations

import enum
from typing import Self

__all__ = ["DropKind", "DropReason"]


class DropKind(enum.StrEnum):
    """Kinds of reasons for which there is advice."""

    REFUSED = "refused"
    """The site does not take part."""
    LOST = "lost"
    """The transport lost the site."""
    FAILED = "failed"
    """The site's app failed."""
    SILENT = "silent"
    """The site did not answer in time."""
    TOO_FEW = "too_few"
    """The round has too few usable updates."""
    OTHER_FORM = "other_form"
    """The update has another form than the server's model."""
    TOO_QUIET = "too_quiet"
    """The guard finds too little noise, or noise that is not independent."""


class DropReason(str):
    """The text of a reason, with its kind.

    Args:
        text: one line.
        kind: None if there is no advice for the reason.

    Example:
        >>> DropReason("did not answer", DropKind.SILENT).kind.value
        'silent'
    """

    kind: DropKind | None

    def __new__(cls, text: str, kind: DropKind | None = None) -> Self:
        """Make a reason."""
        reason = super().__new__(cls, text)
        reason.kind = kind
        return reason

    @classmethod
    def of(cls, error: Exception, more: str = "") -> Self:
        """The reason that an error was raised with, followed by more text."""
        (reason, *_) = error.args or ("",)
        return cls(f"{error}{more}", getattr(reason, "kind", None))
