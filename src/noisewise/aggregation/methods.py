"""`Method`, the clients' and the server's part of a method, and the table of all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from types import MappingProxyType
from typing import Any

from noisewise.aggregation.auto_steps import AutoSteps
from noisewise.aggregation.base import Aggregator, Disclosure
from noisewise.aggregation.guard import Guard, Guardable, as_guardable
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.oracle import Oracle
from noisewise.aggregation.pfa import PFA
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.aggregation.weighted import BudgetWeighted, ExampleWeighted, WeiAvg
from noisewise.checks import non_negative_int, positive_number, printable_name
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator
from noisewise.noise.registry import make_estimator
from noisewise.plugins import load_object
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT
from noisewise.privacy.plan import LocalPlan, make_plan, non_private_plan

__all__ = ["METHODS", "Method", "make_method", "plan_clients", "smallest_epsilon"]

_METHOD_OPTIONS = ("normalise", "server_steps", "average_rounds")  # of Method, not the aggregator

Adapt = Callable[[Sequence[ClientSpec]], tuple[ClientSpec, ...]]


def unchanged(specs: Sequence[ClientSpec]) -> tuple[ClientSpec, ...]:
    """Return the specs unchanged: every client keeps its own budget."""
    return tuple(specs)


def smallest_epsilon(specs: Sequence[ClientSpec]) -> tuple[ClientSpec, ...]:
    """Return the specs with the smallest epsilon for every client: the baseline MinEpsilon."""
    smallest = min(spec.epsilon for spec in specs)
    return tuple(replace(spec, epsilon=smallest) for spec in specs)


@dataclass(frozen=True)
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
        shares_model: False if nothing leaves the clients: each trains a model of its own, with
            ``aggregator`` on its own updates only. For simulations only.
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

    def __post_init__(self) -> None:
        printable_name("method.name", self.name)
        if self.server_steps is not None:
            positive_number("server_steps", self.server_steps)
        non_negative_int("average_rounds", self.average_rounds)
        if not isinstance(self.normalise, bool):
            raise InvalidValueError("normalise", self.normalise, "must be true or false")
        if hasattr(self.aggregator, "guard") or hasattr(self.aggregator, "with_guard"):
            as_guardable(self.aggregator, self.name)  # with one of the two it would run unguarded

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
        known = Disclosure.TRUE_VARIANCE in self.needs
        return not self.private or not self.shares_model or known

    def guarded(self, floor: float, tolerated_attackers: int) -> Method:
        """Return the method with a `Guard`; it also clips updates that are normalised.

        Args:
            floor: F, see `noisewise.aggregation.noise_floor.noise_floor`.
            tolerated_attackers: f.

        Raises:
            InvalidValueError: the aggregator is not `Guardable`, or its ``with_guard`` returns an
                aggregator without the guard.
        """
        guard = Guard(floor, tolerated_attackers, clip=self.normalise)
        aggregator = as_guardable(self.aggregator, self.name).with_guard(guard)
        method = replace(self, aggregator=aggregator)
        if method.guard != guard:
            kind = type(self.aggregator).__name__
            allowed = f"{kind}.with_guard(guard) must return a copy whose `guard` is that guard"
            raise InvalidValueError("method.name", self.name, allowed)
        return method


def plan_clients(
    specs: Sequence[ClientSpec],
    method: Method,
    *,
    rounds: int | Sequence[int],
    clip_norm: float,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> tuple[LocalPlan, ...]:
    """Make the local plans of all clients for a method.

    Args:
        specs: the clients' own settings.
        method: decides which budget, if any, the plans have.
        rounds: number of rounds that each budget is planned for; one number, or one for each
            client. A client no longer takes part after its planned rounds.
        clip_norm: c.
        accountant: ``pld``, ``rdp`` or ``moments``.

    Returns:
        One plan for each client, in the order of ``specs``.

    Raises:
        InvalidValueError: the number of ``rounds`` is wrong, or a plan is not possible.
        AccountingError: no noise meets a client's budget.
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
        make_plan(s, rounds=r, clip_norm=clip_norm, accountant=accountant) for s, r in pairs
    )


def _robust_hdp(estimator: str | Estimator = "pcp", **options: Any) -> RobustHDP:
    """Build RobustHDP; configs give the estimator by name."""
    made = make_estimator(estimator) if isinstance(estimator, str) else estimator
    return RobustHDP(made, **options)


def _noisewise(estimator: str | Estimator = "factor", **options: Any) -> NoiseWise:
    """Build NoiseWise; configs give the estimator by name."""
    made = make_estimator(estimator) if isinstance(estimator, str) else estimator
    return NoiseWise(made, **options)


@dataclass(frozen=True)
class _Row:
    """One row of the table of methods.

    ``unnormalised`` holds default options for updates that are not divided by their steps.
    """

    factory: Callable[..., object]
    summary: str
    adapt: Adapt = unchanged
    private: bool = True
    normalise: bool = False
    shares_model: bool = True
    unnormalised: Mapping[str, Any] = field(default_factory=dict)


METHODS: Mapping[str, _Row] = MappingProxyType(
    {
        "NoiseWise": _Row(
            _noisewise,
            "the best signal-to-noise ratio from estimated noise, on step-normalised updates",
            normalise=True,
            unnormalised={"signal": "loadings"},
        ),
        "RobustHDP": _Row(_robust_hdp, "weights from the noise that the server estimates"),
        "WeiAvg": _Row(WeiAvg, "weights by the epsilons that clients report"),
        "PFA": _Row(
            PFA, "as WeiAvg; updates of small-epsilon clients are projected on those of the others"
        ),
        "BudgetAvg": _Row(
            BudgetWeighted, "weights by (N epsilon)^2 on step-normalised updates", normalise=True
        ),
        "DPFedAvg": _Row(ExampleWeighted, "weights by dataset size"),
        "MinEpsilon": _Row(
            ExampleWeighted,
            "as DPFedAvg; every client uses the smallest epsilon of all clients",
            smallest_epsilon,
        ),
        # A client knows its own noise, and the oracle's weight of a single update is 1.
        "Alone": _Row(
            Oracle,
            "every client trains its own model with its own budget and shares nothing",
            shares_model=False,
        ),
        "FedAvg": _Row(ExampleWeighted, "as DPFedAvg without privacy: a reference", private=False),
        "Oracle": _Row(
            Oracle, "weights from the true noise, which no real server knows: a reference"
        ),
    }
)
"""All methods by name; `make_method` builds one."""


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
    row = METHODS.get(name)
    if row is None and ":" in name:
        loaded = load_object(name, "method.name")
        factory = loaded if callable(loaded) else (lambda: loaded)
        row = _Row(factory, f"own aggregator {name}")
    if row is None:
        known = ", ".join(METHODS)
        raise InvalidValueError(
            "method.name", name, f'must be one of {known}, or "package.module:name"'
        )
    arguments = dict(options or {})
    fields = {key: arguments.pop(key) for key in _METHOD_OPTIONS if key in arguments}
    fields = {"normalise": row.normalise} | fields
    if not fields["normalise"]:
        arguments = {**row.unnormalised, **arguments}
    try:
        aggregator = row.factory(**arguments)
    except TypeError as error:
        raise InvalidValueError("method.options", dict(options or {}), str(error)) from error
    if not isinstance(aggregator, Aggregator):
        raise InvalidValueError(
            "method.name", name, "must be an aggregator: an object with needs and aggregate()"
        )
    if not all(isinstance(need, Disclosure) for need in aggregator.needs):
        raise InvalidValueError(
            f"{name}.needs",
            aggregator.needs,
            "must be a frozenset of noisewise.aggregation.Disclosure",
        )
    fields["shares_model"] = row.shares_model
    return Method(name, aggregator, row.adapt, row.private, row.summary, **fields)
