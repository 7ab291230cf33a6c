"""The errors of the package. Each message names the argument, its value and what to do."""

from __future__ import annotations

from noisewise.text import printable

__all__ = [
    "AccountingError",
    "BudgetSpentError",
    "DiskFullError",
    "InvalidValueError",
    "LedgerError",
    "MissingExtraError",
    "NoHonestUpdateError",
    "NoUpdatesError",
    "NoisewiseError",
    "SourceError",
    "UnsupportedModelError",
    "UpdateError",
    "VaultError",
]


class NoisewiseError(Exception):
    """Base class of all errors that noisewise raises on purpose.

    Example:
        >>> try:
        ...     raise InvalidValueError("epsilon", -1, "must be a finite number > 0")
        ... except NoisewiseError as error:
        ...     print(error)
        epsilon = -1: must be a finite number > 0
    """


class InvalidValueError(NoisewiseError, ValueError):
    """A value that the caller gave is not allowed.

    Args:
        field: name of the argument or config key; nested keys are joined by dots.
        value: the value that was given.
        allowed: what is allowed, and what to do.

    Example:
        >>> print(InvalidValueError("training.rounds", -1, "must be a whole number >= 1"))
        training.rounds = -1: must be a whole number >= 1
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(printable(f"{field} = {value!r}: {allowed}", lines=True))

    def __reduce__(self) -> tuple[type[InvalidValueError], tuple[str, object, str]]:
        """Keep field, value and allowed when the error passes between worker processes."""
        return type(self), (self.field, self.value, self.allowed)


class AccountingError(NoisewiseError):
    """A privacy accountant cannot compute a bound that holds."""


class DiskFullError(NoisewiseError, OSError):
    """The disk is full. Files that were written before are complete, so a run can be resumed.

    It takes what `OSError` takes: the error number and the error text of the operating system, and
    the file that could not be written.
    """

    def __str__(self) -> str:
        """Return one line that says what to do."""
        remedy = "free disk space, then run the same command again to resume"
        return f"{self.filename}: {self.strerror}; {remedy}"


class LedgerError(NoisewiseError):
    """A ledger is missing, corrupt, not the expected one, or cannot be written.

    The ledger then grants no request.
    """


class BudgetSpentError(LedgerError):
    """A request costs more than what is left of the budget, so the ledger does not grant it."""


class UnsupportedModelError(NoisewiseError):
    """The model has a layer without per-sample gradients, for example BatchNorm."""


class UpdateError(NoisewiseError):
    """No usable update is left to aggregate, or an update matrix is malformed."""


class NoHonestUpdateError(UpdateError):
    """The guard dropped every update of a round; the model does not change."""


class NoUpdatesError(UpdateError):
    """The run of a server ended and no round changed the model, so there is no trained model."""


class SourceError(NoisewiseError):
    """No source has a dataset, or its bytes differ from the published ones."""


class MissingExtraError(NoisewiseError):
    """An optional library is not installed. The message contains the install command."""


class VaultError(NoisewiseError):
    """A vault cannot start, cannot be reached, or its connection failed."""
