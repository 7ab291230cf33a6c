"""The table of estimators by name; your own estimators are imported by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from noisewise.checks import known_name
from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator
from noisewise.noise.factor_estimator import Factor
from noisewise.noise.norm_estimator import Norm
from noisewise.noise.pcp_estimator import PCP
from noisewise.plugins import OR_OWN, load_object

__all__ = ["ESTIMATORS", "make_estimator"]

ESTIMATORS: Mapping[str, Callable[..., Estimator]] = MappingProxyType(
    {"pcp": PCP, "factor": Factor, "norm": Norm}
)
"""The built-in estimators by name; `make_estimator` builds one."""


def make_estimator(name: str, **options: object) -> Estimator:
    """Build an estimator by name, or import your own.

    Args:
        name: a name in `ESTIMATORS`, or the path ``"package.module:name"`` of your own estimator:
            a class, a function that returns an estimator, or an estimator.
        options: keyword arguments of the class or function.

    Returns:
        The estimator.

    Raises:
        InvalidValueError: the name is unknown, an option is invalid, or the object is not an
            `Estimator`.

    Example:
        >>> make_estimator("norm").name
        'norm'
    """
    factory: object
    if ":" in name:
        factory = load_object(name, "estimator")
    else:
        factory = ESTIMATORS[known_name("estimator", name, ESTIMATORS, OR_OWN)]
    try:
        estimator = factory(**options) if callable(factory) else factory
    except TypeError as error:
        raise InvalidValueError("estimator", name, str(error)) from error
    if not isinstance(estimator, Estimator):
        raise InvalidValueError("estimator", name, "must have a name and estimate(updates)")
    return estimator
