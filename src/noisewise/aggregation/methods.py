"""`Method`: what the clients do plus what the server does, and the table of all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from types import MappingProxyType
from typing import Any

from noisewise.aggregation.base import Aggregator, Disclosure
from noisewise.aggregation.guard import Guard
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.oracle import Oracle
from noisewise.aggregation.pfa import PFA
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.aggregation.weighted import BudgetWeighted, ExampleWeighted, WeiAvg
from noisewise.checks import non_negative_int, positive_number, printable_name
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator
from noisewise.noise.table import make_estimator
from noisewise.plugins import load_object
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT
from noisewise.privacy.plan import LocalPlan, make_plan, non_private_plan

__all__ = ["METHODS", "Method", "make_method", "plan_clients", "smallest_epsilon"]

_AROUND = ("normalise", "server_steps", "average_rounds")

Adapt = Callable[[Sequence[ClientSpec]], tuple[ClientSpec, ...]]


def as_they_are(specs: Sequence[ClientSpec]) -> tuple[ClientSpec, ...]:
    """Every client keeps its own budget."""
    return tuple(specs)


def smallest_epsilon(specs: Sequence[ClientSpec]) -> tuple[ClientSpec, ...]:
    """Every client uses the smallest epsilon of all: the baseline "minimum epsilon"."""
    least = min(spec.epsilon for spec in specs)
    return tuple(replace(spec, epsilon=least) for spec in specs)


@dataclass(frozen=True)
class Method:
    """What the clients do plus what the server does.

    Attributes:
        name: as in tables and configs.
        aggregator: the server's part.
        adapt: the clients' part: how their settings change before they plan.
        private: False only for the reference without privacy, whose plans have no budget.
        summary: one line for people.
        normalise: each client divides its update by its own number of local steps before it is
            sent: post-processing, which discloses nothing and costs no privacy.
        server_steps: by how many average local steps the server moves the model in a round, where
            updates are normalised: a public constant of the federation, as if everyone took so
            many steps. None is to be settled from the permitted plans (`settled`).
        average_rounds: the released model is a moving average of the global model over about so
            many rounds; 0 releases the model itself. Post-processing, too.
    """

    name: str
    aggregator: Aggregator
    adapt: Adapt = as_they_are
    private: bool = True
    summary: str = ""
    normalise: bool = False
    server_steps: float | None = None
    average_rounds: int = 0

    def __post_init__(self) -> None:
        printable_name("method.name", self.name)
        if self.server_steps is not None:
            positive_number("server_steps", self.server_steps)
        non_negative_int("average_rounds", self.average_rounds)
        if not isinstance(self.normalise, bool):
            raise InvalidValueError("normalise", self.normalise, "must be true or false")

    @property
    def server_rate(self) -> float:
        """By what the aggregated update is multiplied before it is added to the model."""
        if not self.normalise:
            return 1.0
        if self.server_steps is None:
            raise InvalidValueError("server_steps", None, "must be given or settled from plans")
        return self.server_steps

    def settled(self, permitted: Sequence[LocalPlan]) -> Method:
        """The method with its server steps: the median of the permitted plans, if it has none.

        Half as many or twice as many would do with another learning rate; a number near the
        clients' own keeps the local steps as long as the method without normalising has them.
        """
        if not self.normalise or self.server_steps is not None or not permitted:
            return self
        return replace(
            self, server_steps=float(median_high(plan.steps_per_round for plan in permitted))
        )

    def guarded(self, floor: float, tolerated_attackers: int) -> Method:
        """The method behind a `Guard`, which bounds updates that are normalised as well.

        Args:
            floor: F, see `noisewise.aggregation.policy.noise_floor`.
            tolerated_attackers: f.
        """
        if not isinstance(self.aggregator, NoiseWise | RobustHDP):
            raise InvalidValueError("method.name", self.name, "must weigh by noise to be guarded")
        guard = Guard(floor, tolerated_attackers, clip=self.normalise)
        return replace(self, aggregator=replace(self.aggregator, guard=guard))


def plan_clients(
    specs: Sequence[ClientSpec],
    method: Method,
    *,
    rounds: int | Sequence[int],
    clip_norm: float,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> tuple[LocalPlan, ...]:
    """The local plans of all clients under a method, in the order of ``specs``.

    Args:
        specs: the clients' own settings.
        method: decides with which budget, if any, they plan.
        rounds: for how many rounds each budget has to last; one number or one for each client. A
            client whose planned rounds are over does not take part any more.
        clip_norm: c.
        accountant: ``pld``, ``rdp`` or ``moments``.
    """
    lasting = [rounds] * len(specs) if isinstance(rounds, int) else list(rounds)
    if len(lasting) != len(specs):
        raise InvalidValueError("rounds", f"{len(lasting)} values", f"must be one or {len(specs)}")
    pairs = list(zip(method.adapt(specs), lasting, strict=True))
    if not method.private:
        return tuple(non_private_plan(s, rounds=r, accountant=accountant) for s, r in pairs)
    return tuple(
        make_plan(s, rounds=r, clip_norm=clip_norm, accountant=accountant) for s, r in pairs
    )


def _robust_hdp(estimator: str | Estimator = "pcp", **options: Any) -> RobustHDP:
    """RobustHDP whose estimator may be given by name, as configs do."""
    made = make_estimator(estimator) if isinstance(estimator, str) else estimator
    return RobustHDP(made, **options)


def _noisewise(estimator: str | Estimator = "factor", **options: Any) -> NoiseWise:
    """NoiseWise whose estimator may be given by name, as configs do."""
    made = make_estimator(estimator) if isinstance(estimator, str) else estimator
    return NoiseWise(made, **options)


@dataclass(frozen=True)
class _Row:
    """One line of the table of methods."""

    factory: Callable[..., object]
    summary: str
    adapt: Adapt = as_they_are
    private: bool = True
    normalise: bool = False


METHODS: Mapping[str, _Row] = MappingProxyType(
    {
        "NoiseWise": _Row(
            _noisewise,
            "the best signal-to-noise ratio from estimated noise, on step-normalised updates",
            normalise=True,
        ),
        "RobustHDP": _Row(_robust_hdp, "weights from the noise that the server estimates itself"),
        "WeiAvg": _Row(WeiAvg, "weights by the epsilons that clients report"),
        "PFA": _Row(PFA, "as WeiAvg, noisy clients projected on the others' main direction"),
        "BudgetAvg": _Row(
            BudgetWeighted, "weights by (N epsilon)^2 on step-normalised updates", normalise=True
        ),
        "DPFedAvg": _Row(ExampleWeighted, "weights by dataset size"),
        "MinEpsilon": _Row(
            ExampleWeighted, "everyone uses the smallest epsilon of all", smallest_epsilon
        ),
        "FedAvg": _Row(ExampleWeighted, "no privacy at all: the reference", private=False),
        "Oracle": _Row(Oracle, "weights from the true noise: out of reach, for comparison"),
    }
)
"""All methods by name; `make_method` builds one."""


def make_method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method by its name in `METHODS`, or an own aggregator as ``"package.module:name"``.

    Args:
        name: of a method, or where to import an `Aggregator` class, factory or object.
        options: keyword arguments of the aggregator; ``normalise``, ``server_steps`` and
            ``average_rounds`` are those of the `Method` and go with any aggregator.

    Example:
        >>> make_method("RobustHDP", {"estimate": "first"}).aggregator.needs
        frozenset()
    """
    row = METHODS.get(name)
    if row is None and ":" in name:
        found = load_object(name, "method.name")
        factory = found if callable(found) else (lambda: found)
        row = _Row(factory, f"own aggregator {name}")
    if row is None:
        known = ", ".join(METHODS)
        raise InvalidValueError(
            "method.name", name, f'must be one of {known}, or "package.module:name"'
        )
    own = dict(options or {})
    around = {key: own.pop(key) for key in _AROUND if key in own}
    around = {"normalise": row.normalise} | around
    if name == "NoiseWise" and around["normalise"] is False:
        own.setdefault("signal", "loadings")
    try:
        aggregator = row.factory(**own)
    except TypeError as error:
        raise InvalidValueError("method.options", dict(options or {}), str(error)) from error
    if not isinstance(aggregator, Aggregator):
        raise InvalidValueError("method.name", name, "must give an object with needs, aggregate()")
    if not all(isinstance(need, Disclosure) for need in aggregator.needs):
        raise InvalidValueError(
            f"{name}.needs",
            aggregator.needs,
            "must be a frozenset of noisewise.aggregation.Disclosure",
        )
    return Method(name, aggregator, row.adapt, row.private, row.summary, **around)
