"""The table of estimators by name, and own ones by where to import them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from noisewise.errors import InvalidValueError
from noisewise.noise.estimate import Estimator
from noisewise.noise.factor import Factor
from noisewise.noise.norm import Norm
from noisewise.noise.pcp import PCP
from noisewise.plugins import load_object

__all__ = ["ESTIMATORS", "make_estimator"]

ESTIMATORS: Mapping[str, Callable[..., Estimator]] = MappingProxyType(
    {"pcp": PCP, "factor": Factor, "norm": Norm}
)
"""Estimators of the noise in an update matrix, by name."""


def make_estimator(name: str, **options: object) -> Estimator:
    """Build an estimator by its name, or import an own one as ``"package.module:name"``.

    Example:
        >>> make_estimator("norm").name
        'norm'
    """
    factory: object = ESTIMATORS.get(name)
    if factory is None and ":" in name:
        factory = load_object(name, "estimator")
    if factory is None:
        known = ", ".join(ESTIMATORS)
        raise InvalidValueError(
            "estimator", name, f'must be one of {known}, or "package.module:name"'
        )
    try:
        made = factory(**options) if callable(factory) else factory
    except TypeError as error:
        raise InvalidValueError("estimator", name, str(error)) from error
    if not isinstance(made, Estimator):
        raise InvalidValueError("estimator", name, "must have a name and estimate(updates)")
    return made
