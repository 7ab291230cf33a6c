"""The errors of the package. Each message names the argument, its value and the remedy."""

from __future__ import annotations

from noisewise.text import printable

__all__ = [
    "AccountingError",
    "BudgetSpentError",
    "DiskFullError",
    "InvalidValueError",
    "LedgerError",
    "MissingExtraError",
    "NoUpdatesError",
    "NoisewiseError",
    "SourceError",
    "UnsupportedModelError",
    "UpdateError",
]


class NoisewiseError(Exception):
    """Base of every error that noisewise raises on purpose."""


class InvalidValueError(NoisewiseError, ValueError):
    """A value that the caller gave is impossible.

    Args:
        field: name of the argument or config key, dotted for nested ones.
        value: what was given.
        allowed: what would have been right.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(printable(f"{field} = {value!r}: {allowed}", lines=True))

    def __reduce__(self) -> tuple[type[InvalidValueError], tuple[str, object, str]]:
        """Travel between worker processes with all three parts."""
        return type(self), (self.field, self.value, self.allowed)


class AccountingError(NoisewiseError):
    """A privacy accountant cannot give a number that we may promise."""


class DiskFullError(NoisewiseError, OSError):
    """There is no room for a file. What was written before is whole, so a run can be resumed.

    Args:
        errno: the system's number of the error.
        strerror: the system's text.
        filename: what could not be written.
    """

    def __str__(self) -> str:
        """One line with the remedy."""
        remedy = "make room, then run the same command again to resume"
        return f"{self.filename}: {self.strerror}; {remedy}"


class LedgerError(NoisewiseError):
    """A ledger is missing, corrupt, foreign or cannot be written: nothing is granted."""


class BudgetSpentError(LedgerError):
    """What was asked for does not fit into what is left of the budget: nothing is granted."""


class UnsupportedModelError(NoisewiseError):
    """The model has a layer for which per-sample gradients make no sense (BatchNorm)."""


class UpdateError(NoisewiseError):
    """No usable update is left to aggregate, or an update matrix is malformed."""


class NoHonestUpdateError(UpdateError):
    """A guard refused every update of a round; the model stays as it was."""


class NoUpdatesError(UpdateError):
    """A server's run ended and no round changed the model: there is no trained model."""


class SourceError(NoisewiseError):
    """A dataset cannot be had from any of its sources, or its bytes are not the published ones."""


class MissingExtraError(NoisewiseError):
    """An optional library is not installed; the message holds the install command."""
