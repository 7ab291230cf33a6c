"""Hostile clients for the simulator: what they send instead of an honest update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from noisewise.checks import known_name, positive_number
from noisewise.errors import InvalidValueError
from noisewise.randomness import keyed_generator
from noisewise.text import short_repr

__all__ = ["ATTACKS", "Attack", "AttackKind", "attacked", "check_attacks"]


@dataclass(frozen=True)
class AttackKind:
    """One way to attack.

    Attributes:
        send: (the client's own update, strength, noise of energy F) -> what it sends.
        summary: what the attacker sends, in one line.
        noise_free: whether the attacker trains without noise, for a clean direction.
        breaks_policy: whether no honest client could have sent it, so that a guard can detect it.
        together: whether all attackers send the same update.
        first_round: whether the update of every round is made from the client's own update of the
            first round.
        shared: whether several attackers divide the coordinates among them: each sends noise of
            energy F outside its share, so that no two updates are close to each other.
        strength: of an `Attack` that sets none.
    """

    send: Callable[[Tensor, float, Tensor], Tensor]
    summary: str
    noise_free: bool = False
    breaks_policy: bool = True
    together: bool = False
    first_round: bool = False
    shared: bool = False
    strength: float = 1.0


ATTACKS: Mapping[str, AttackKind] = MappingProxyType(
    {
        "zero": AttackKind(lambda own, _, __: torch.zeros_like(own), "sends zeros"),
        "constant": AttackKind(
            lambda own, size, _: torch.full_like(own, size), "one tiny number in every coordinate",
            strength=1e-6,
        ),
        "sign_flip": AttackKind(
            lambda own, size, _: -size * own, "the opposite direction, without noise",
            noise_free=True,
        ),
        "sign_flip_at_floor": AttackKind(
            lambda own, size, noise: noise - size * own,
            "the opposite direction, with exactly the least noise that the policy permits",
            noise_free=True, breaks_policy=False,
        ),
        "antisign": AttackKind(
            lambda own, size, noise: -size * own.sign() * noise.abs(),
            "the magnitudes of the least permitted noise, with signs opposite to its own update",
            noise_free=True, breaks_policy=False, shared=True,
        ),
        "fixed": AttackKind(
            lambda own, size, noise: -size * own.sign() * noise.abs(),
            "the same as antisign, in every round with the signs of the first round",
            noise_free=True, breaks_policy=False, first_round=True, shared=True,
        ),
        "scaled": AttackKind(
            lambda own, size, _: size * own, "its honest update, a hundred times as large",
            breaks_policy=False, strength=100.0,
        ),
        "sybils": AttackKind(
            lambda own, size, noise: noise - size * own,
            "several clients send the same opposite direction, with noise", noise_free=True,
            together=True,
        ),
        "nan": AttackKind(
            lambda own, _, __: torch.full_like(own, math.nan), "sends NaN"
        ),
        "falsified_epsilon": AttackKind(
            lambda own, _, __: own, "trains honestly, reports a hundred times its epsilon",
            breaks_policy=False, strength=100.0,
        ),
    }
)  # fmt: skip
"""All attacks by name."""


@dataclass(frozen=True, repr=False)
class Attack:
    """Clients of a federation that attack in the same way.

    Args:
        kind: one of `ATTACKS`.
        clients: their ids.
        strength: factor or size of what they send, see `ATTACKS`; None takes the kind's default.

    Raises:
        InvalidValueError: the kind is unknown, an id is missing or given twice, or the strength is
            not positive.

    Example:
        >>> Attack("sign_flip", ("client-00",))
        Attack(kind='sign_flip', clients=('client-00',))
    """

    kind: str
    clients: tuple[str, ...]
    strength: float | None = None

    def __repr__(self) -> str:
        """Its kind, strength and clients."""
        return short_repr(self, kind=self.kind, strength=self.strength, clients=self.clients)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", known_name("attacks.kind", self.kind, ATTACKS))
        if not self.clients or len(set(self.clients)) != len(self.clients):
            raise InvalidValueError(
                "attacks.clients", self.clients, "must be at least one id, each once"
            )
        if self.kind == "sybils" and len(self.clients) < 2:
            raise InvalidValueError("attacks.clients", self.clients, "must be at least two ids")
        if self.strength is not None:
            positive_number("attacks.strength", self.strength)

    @property
    def properties(self) -> AttackKind:
        """The properties of its kind."""
        return ATTACKS[self.kind]

    @property
    def size(self) -> float:
        """The strength, or the default of the kind."""
        return self.properties.strength if self.strength is None else self.strength


def check_attacks(attacks: Sequence[Attack], ids: Sequence[str]) -> None:
    """Check that every attacker is a client and takes part in one attack only.

    Raises:
        InvalidValueError: names the client.
    """
    attackers = [client for attack in attacks for client in attack.clients]
    for client in attackers:
        if client not in ids:
            raise InvalidValueError("attacks.clients", client, "must be a client of the federation")
        if attackers.count(client) > 1:
            raise InvalidValueError("attacks.clients", client, "must take part in one attack only")


def attacked(
    received: Mapping[str, Tensor],
    attacks: Sequence[Attack],
    floor: float,
    seed: int,
    round_number: int,
    first: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Replace the attackers' updates by what they send.

    Args:
        received: updates by client id; those of attackers are honest.
        attacks: who attacks and how.
        floor: F, the least noise energy of an honest update.
        seed: of the run.
        round_number: with the seed and the client, it decides the attackers' noise.
        first: the attackers' honest updates of the first round; by default those received.

    Returns:
        What the server receives, by client id.
    """
    sent = dict(received)
    for attack in attacks:
        members = [client for client in attack.clients if client in received]
        for client in members:
            source = members[0] if attack.properties.together else client
            fixed = attack.properties.first_round
            own = (first or received)[source] if fixed else received[source]
            generator = keyed_generator(seed, round_number, source, "attack")
            noise = torch.from_numpy(generator.standard_normal(len(own))).to(own)
            noise *= math.sqrt(floor / len(own))
            sent[client] = attack.properties.send(own, attack.size, noise)
            if attack.properties.shared:
                n, position = len(attack.clients), attack.clients.index(client)
                share = torch.arange(len(own), device=own.device) % n == position
                sent[client] = torch.where(share, sent[client], noise)
    return sent
