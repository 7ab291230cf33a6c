"""`Method`, the clients' and the server's part of a method; `make_method` and `plan_clients`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

from noisewise.aggregation.auto_steps import AutoSteps
from noisewise.aggregation.base import Aggregator, Disclosure
from noisewise.aggregation.guard import Guard, Guardable, as_guardable
from noisewise.aggregation.method_facts import METHODS, Adapt, MethodFacts, unchanged
from noisewise.aggregation.schedules import Schedule
from noisewise.aggregation.server_optimisers import ServerOptimiser
from noisewise.checks import known_name, non_negative_int, positive_number, printable_name
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.noise.registry import make_estimator
from noisewise.plugins import OR_OWN, load_object
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT
from noisewise.privacy.plan import LocalPlan, make_plan, non_private_plan
from noisewise.text import short_repr

__all__ = ["Method", "make_method", "plan_clients"]

_METHOD_OPTIONS = ("normalise", "server_steps", "average_rounds")  # of Method, not the aggregator


@dataclass(frozen=True, repr=False)
class Method:
    """A method: what the clients do and what the server does.

    Attributes:
        name: name in tables and configs.
        aggregator: the server's part.
        adapt: the clients' part: changes their specs before they make their plans.
        private: False only for the reference without privacy, whose plans have no budget.
        summary: one line that describes the method.
        normalise: whether each client divides its update by its own number of local steps before
            it sends the update. This is post-processing: it discloses nothing and costs no privacy.
        server_steps: number of average local steps by which the server moves the model in a round
            if updates are normalised. It is a public constant of the federation. None computes it
            from the permitted plans (`with_server_steps`).
        average_rounds: the released model is a moving average of the global model over about this
            many rounds; 0 releases the global model. This is post-processing, too.
        auto: sets the length of the server's steps and the average that is released, in place of
            ``server_steps`` and ``average_rounds``; None uses these.
        schedule: of the clients' learning rate; None keeps it constant.
        optimiser: applies the aggregated update to the model; None adds it. Not with ``auto``.
        shares_model: False if nothing leaves the clients: each trains a model of its own, with
            ``aggregator`` on its own updates only. For simulations only.

    Example:
        >>> from noisewise.aggregation import RobustHDP
        >>> method = Method("mine", RobustHDP(estimate="first"))
        >>> method.can_be_guarded, method.guarded(floor=0.5, tolerated_attackers=1).guard.floor
        (True, 0.5)
    """

    name: str
    aggregator: Aggregator
    adapt: Adapt = unchanged
    private: bool = True
    summary: str = ""
    normalise: bool = False
    server_steps: float | None = None
    average_rounds: int = 0
    auto: AutoSteps | None = None
    shares_model: bool = True
    schedule: Schedule | None = None
    optimiser: ServerOptimiser | None = None

    def __repr__(self) -> str:
        """Its name and what differs from averaging."""
        return short_repr(
            self, name=self.name, aggregator=type(self.aggregator).__name__,
            private=self.private, needs=sorted(need.value for need in self.needs),
        )  # fmt: skip

    def __post_init__(self) -> None:
        printable_name("method.name", self.name)
        _check_aggregator(self.aggregator, self.name)
        if self.auto is not None and self.optimiser is not None:
            allowed = 'cannot be combined with learning_rate = "auto", which sets the steps itself'
            raise InvalidValueError("server_optimiser", self.optimiser.name, allowed)
        if self.server_steps is not None:
            positive_number("server_steps", self.server_steps)
        non_negative_int("average_rounds", self.average_rounds)
        if not isinstance(self.normalise, bool):
            raise InvalidValueError("normalise", self.normalise, "must be true or false")
        if hasattr(self.aggregator, "guard") or hasattr(self.aggregator, "with_guard"):
            as_guardable(self.aggregator, self.name)  # with one of the two it would run unguarded

    def rate_factor(self, round_number: int) -> float:
        """The factor of the clients' learning rate in a round, counted from 1."""
        return 1.0 if self.schedule is None else self.schedule.factor(round_number)

    @property
    def server_rate(self) -> float:
        """The factor of the aggregated update before it is added to the model, without ``auto``.

        Raises:
            InvalidValueError: updates are normalised and ``server_steps`` is not set.
        """
        if not self.normalise or self.auto is not None:
            return 1.0
        if self.server_steps is None:
            raise InvalidValueError(
                "server_steps", None, "must be a number > 0: set it, or call with_server_steps()"
            )
        return self.server_steps

    def with_server_steps(self, permitted: Sequence[LocalPlan]) -> Method:
        """Return the method with ``server_steps`` set, if it needs them and has none.

        The value is the median of the permitted plans' numbers of steps. Any value of this order
        works with a suitable learning rate; one near the clients' own numbers suits the learning
        rate of the same method without normalising.

        Args:
            permitted: the plans that the federation permits, or those of all clients.
        """
        if not self.normalise or self.server_steps is not None or not permitted:
            return self
        return replace(
            self, server_steps=float(median_high(plan.steps_per_round for plan in permitted))
        )

    @property
    def can_be_guarded(self) -> bool:
        """Whether the aggregator weights by noise and can have a guard."""
        return isinstance(self.aggregator, Guardable)

    @property
    def guard(self) -> Guard | None:
        """The aggregator's guard, or None."""
        return self.aggregator.guard if isinstance(self.aggregator, Guardable) else None

    @property
    def needs(self) -> frozenset[Disclosure]:
        """What clients disclose to the server; nothing if they share no model."""
        return self.aggregator.needs if self.shares_model else frozenset()

    @property
    def is_reference(self) -> bool:
        """Whether it is for comparison only: no privacy, no common model, or the true noise."""
        needs_true_noise = Disclosure.TRUE_VARIANCE in self.needs
        return not self.private or not self.shares_model or needs_true_noise

    def guarded(self, floor: float, tolerated_attackers: int) -> Method:
        """Return the method with a `Guard`; it also clips updates that are normalised.

        Args:
            floor: F, see `noisewise.aggregation.noise_floor.noise_floor`.
            tolerated_attackers: f.

        Raises:
            InvalidValueError: the aggregator is not `Guardable`, or its ``with_guard`` returns
                something else than a copy with the guard.
        """
        guard = Guard(floor, tolerated_attackers, clip=self.normalise)
        copy: object = as_guardable(self.aggregator, self.name).with_guard(guard)
        same_kind = type(copy) is type(self.aggregator)
        if not same_kind or not isinstance(copy, Guardable) or copy.guard != guard:
            kind = type(self.aggregator).__name__
            allowed = f"{kind}.with_guard(guard) must return a copy whose `guard` is that guard"
            allowed += "" if same_kind else f", not a {type(copy).__name__}"
            raise InvalidValueError("method.name", self.name, allowed)
        return replace(self, aggregator=copy)


def _check_aggregator(aggregator: object, method: str) -> None:
    """Refuse an object that is no aggregator, such as the class in place of an object of it."""
    if isinstance(aggregator, type) or not isinstance(aggregator, Aggregator):
        allowed = "must be an aggregator: an object with needs and aggregate()"
        if isinstance(aggregator, type):
            allowed += f", not the class {aggregator.__name__}; call the class"
        raise InvalidValueError("method.name", method, allowed)
    needs: object = aggregator.needs
    if not isinstance(needs, Collection) or not all(isinstance(n, Disclosure) for n in needs):
        allowed = "must be a frozenset of noisewise.aggregation.Disclosure"
        raise InvalidValueError(f"{method}.needs", needs, allowed)


def plan_clients(
    specs: Sequence[ClientSpec],
    method: Method,
    *,
    rounds: int | Sequence[int],
    clip_norm: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    clip_rule: str = "norm",
) -> tuple[LocalPlan, ...]:
    """Make the local plans of all clients for a method.

    Args:
        specs: the clients' own settings.
        method: decides which budget, if any, the plans have.
        rounds: number of rounds that each budget is planned for; one number, or one for each
            client. A client no longer takes part after its planned rounds.
        clip_norm: c.
        accountant: ``pld``, ``rdp`` or ``moments``.
        clip_rule: "norm" or "normalise"; see `LocalPlan`.

    Returns:
        One plan for each client, in the order of ``specs``.

    Raises:
        InvalidValueError: the number of ``rounds`` is wrong, or a plan is not possible.
        AccountingError: no noise meets a client's budget.

    Example:
        >>> specs = [ClientSpec("a", 600, 30, 1.0, 1e-5), ClientSpec("b", 600, 30, 4.0, 1e-5)]
        >>> plans = plan_clients(specs, make_method("MinEpsilon"), rounds=2, clip_norm=1.0)
        >>> plans[0].noise_multiplier == plans[1].noise_multiplier
        True
    """
    planned = [rounds] * len(specs) if isinstance(rounds, int) else list(rounds)
    if len(planned) != len(specs):
        raise InvalidValueError(
            "rounds", f"{len(planned)} values", f"must be one value or {len(specs)} values"
        )
    pairs = list(zip(method.adapt(specs), planned, strict=True))
    if not method.private:
        return tuple(non_private_plan(s, rounds=r, accountant=accountant) for s, r in pairs)
    return tuple(
        make_plan(s, rounds=r, clip_norm=clip_norm, accountant=accountant, clip_rule=clip_rule)
        for s, r in pairs
    )


def make_method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Build a method by name, or from your own aggregator.

    Args:
        name: a name in `METHODS`, or the path ``"package.module:name"`` of your own aggregator: a
            class, a function that returns an aggregator, or an aggregator.
        options: keyword arguments of the aggregator. ``normalise``, ``server_steps`` and
            ``average_rounds`` set the fields of the `Method` and work with any aggregator.

    Returns:
        The method.

    Raises:
        InvalidValueError: the name is unknown, an option is invalid, or the object is not an
            `Aggregator`.

    Example:
        >>> make_method("RobustHDP", {"estimate": "first"}).aggregator.needs
        frozenset()
    """
    arguments = dict(options or {})
    if ":" in name:
        facts = MethodFacts(name, f"own aggregator {name}")
    else:
        name = known_name("method.name", name, METHODS, OR_OWN)
        facts = METHODS[name]
        if isinstance(arguments.get("estimator"), str):
            arguments["estimator"] = make_estimator(arguments["estimator"])
    fields = {key: arguments.pop(key) for key in _METHOD_OPTIONS if key in arguments}
    fields = {"normalise": facts.normalise} | fields
    if not fields["normalise"]:
        arguments = {**facts.unnormalised, **arguments}
    loaded = load_object(facts.factory, "method.name")
    factory = loaded if callable(loaded) else (lambda: loaded)
    try:
        aggregator: Any = factory(**arguments)
    except TypeError as error:
        raise InvalidValueError("method.options", dict(options or {}), str(error)) from error
    fields["shares_model"] = facts.shares_model
    return Method(name, aggregator, facts.adapt, facts.private, facts.summary, **fields)
