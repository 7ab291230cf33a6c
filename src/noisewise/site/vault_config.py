"""`[vault]` of a site's file: which federations a vault serves, through which sockets."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from noisewise.checks import repeated
from noisewise.errors import InvalidValueError
from noisewise.schema import Count, Strict

__all__ = ["FederationPart", "RoundLimit", "VaultPart", "check_shares", "round_limit"]

_MOST_SECONDS = 1800  # a relay waits an hour for a reply
_OTHERS = 0o007
_WRITE = 0o220


Seconds = Annotated[float, Field(gt=0, le=_MOST_SECONDS, allow_inf_nan=False)]


class FederationPart(Strict):
    """One federation: its socket, the account of its relay, its share of the rounds.

    ``socket`` is an absolute path. Only ``account`` can use it; ``group`` (by default the primary
    group of the account) and ``mode`` are those of the socket. ``rounds`` is the share of this
    federation; federations without one use together what the shares leave.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    socket: Annotated[str, Field(pattern=r"^/")]
    account: str
    group: str | None = None
    mode: int = 0o660
    rounds: Count | None = None

    @model_validator(mode="after")
    def _closed_to_others(self) -> FederationPart:
        if self.mode & ~0o777 or self.mode & _OTHERS or not self.mode & _WRITE:
            raise ValueError("mode must be like 0o660, without access for other accounts")
        return self


class VaultPart(Strict):
    """How `noisewise site serve` answers.

    Replies leave at multiples of ``reply_grid_seconds`` after their request began. A relay has
    ``frame_seconds`` to send a frame or to read a reply. A request waits at most ``wait_seconds``
    for an earlier one of its federation. ``connections`` bounds the open ones of a federation.
    ``relays_see_no_processes = true`` declares that the relays run where ``/proc`` shows them only
    their own processes (``ProtectProc=invisible`` of systemd, another container).
    """

    federations: Annotated[list[FederationPart], Field(min_length=1)]
    reply_grid_seconds: Seconds = 0.5
    frame_seconds: Seconds = 30.0
    wait_seconds: Seconds = 600.0
    connections: Count = 8
    relays_see_no_processes: bool = False

    @model_validator(mode="after")
    def _separate(self) -> VaultPart:
        for field in ("name", "socket", "account"):
            values = [getattr(one, field) for one in self.federations]
            if field == "socket":  # one path has several spellings, such as /run//a and /run/./a
                values = ["/" + os.path.normpath(value).lstrip("/") for value in values]
            if (twice := repeated(values)) is not None:
                raise ValueError(f"{field} {twice!r} is used twice: must differ by federation")
        return self


@dataclass(frozen=True)
class RoundLimit:
    """How many rounds a federation may have; the arguments of `Ledger.reserve`.

    Attributes:
        at_most: number of rounds.
        counted: whether the rounds of a federation count towards it.
        at_most_in_all: number of rounds of all federations together, however the shares change.
    """

    at_most: int
    counted: Callable[[str], bool]
    at_most_in_all: int


def check_shares(part: VaultPart | None, total: int, file: str) -> None:
    """Check that the shares fit into the rounds of the site.

    Raises:
        InvalidValueError: they do not.
    """
    shares = [one.rounds for one in part.federations if one.rounds] if part else []
    if sum(shares) > total:
        allowed = f"must be at most {total} together, the rounds that the site allows"
        raise InvalidValueError(f"{file}: vault.federations.rounds", shares, allowed)


def round_limit(part: VaultPart | None, federation: str, total: int) -> RoundLimit:
    """The rounds of a federation: its share, or together with others what the shares leave."""
    shares = {one.name: one.rounds for one in part.federations if one.rounds} if part else {}
    if federation in shares:
        return RoundLimit(shares[federation], lambda other: other == federation, total)
    return RoundLimit(total - sum(shares.values()), lambda other: other not in shares, total)
