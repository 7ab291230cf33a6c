"""Calibration: the smallest noise multiplier for a budget, confirmed and cached on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from noisewise.errors import AccountingError, InvalidValueError, NoisewiseError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT, check_bounds, epsilon_of
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.first_guess import first_guess
from noisewise.privacy.pld_accountant import (
    SMALLEST_PLD_NOISE,
    grid_widths,
    pld_epsilon_on_grid,
)
from noisewise.privacy.renyi_accountant import RENYI, moments_floor
from noisewise.storage import cache_dir

__all__ = ["Calibration", "calibrate"]

SLACK = 0.002
"""A calibrated plan may leave up to this share of its epsilon unused."""

LARGEST_EPSILON, SMALLEST_EPSILON, MOST_PLANNED_STEPS = 10_000.0, 0.01, 10_000_000
"""Bounds of a calibration, more than those of the accountants (`noisewise.privacy.accounting`)."""

_LARGEST_Z, _SMALLEST_Z = 1e6, 1e-3

_TOLERANCE_ON_GRIDS = (0.05, 0.03)
"""Relative distance to the target at which the search on the first and the second grid ends."""

_JUMP = 1e-4
"""If a bracket of this relative width holds the target, the accountant's epsilon jumps there."""

version = cache(metadata.version)


@dataclass(frozen=True)
class Calibration:
    """A noise multiplier and its epsilon, which is at most the budget's epsilon."""

    noise_multiplier: float
    epsilon: float


def calibrate(
    budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str = DEFAULT_ACCOUNTANT
) -> Calibration:
    """Find z such that ``steps`` steps at ``sample_rate`` spend at most ``budget``.

    The result is safe, epsilon(z) <= budget.epsilon, and tight, within `SLACK` of it (it may be
    looser for epsilons of many hundreds, where ``pld`` uses ``rdp``). A cached result is confirmed
    by one evaluation before it is used, so a damaged cache can make it neither unsafe nor
    needlessly noisy. A first calibration takes at most 3 seconds of processor time
    (benchmarks/calibration.py).

    Args:
        budget: epsilon from 0.01 to 10,000; delta below the probability that a record is ever
            sampled, and for ``pld`` at least 4.6e-16 times the steps.
        sample_rate: q, from 1e-6 to 1.
        steps: number of steps in all rounds together, at most 10^7.
        accountant: one of `noisewise.privacy.accounting.ACCOUNTANTS`.

    Returns:
        The noise multiplier z and its epsilon.

    Raises:
        InvalidValueError: a value is outside of these bounds.
        AccountingError: no noise multiplier satisfies the budget with this accountant.

    Example:
        >>> round(calibrate(PrivacyBudget(0.5, 1e-4), 32 / 2400, 15_000).noise_multiplier, 1)
        9.7
    """
    _check_bounds(budget, sample_rate, steps, accountant)
    _check_moments_floor(budget, accountant)
    key = _key(budget, sample_rate, steps, accountant)
    cached = _read_cache(_cache_file()).get(key)
    cached = cached and _confirmed(cached, budget, sample_rate, steps, accountant)
    if cached is not None:
        return cached
    result = _search(budget, sample_rate, steps, accountant)
    _append_cache(key, result)
    return result


def _confirmed(
    cached: Calibration, budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str
) -> Calibration | None:
    """The cached result if the accountant finds it safe and tight, else None."""
    try:
        epsilon = epsilon_of(sample_rate, cached.noise_multiplier, steps, budget.delta, accountant)
    except NoisewiseError:
        return None
    is_valid = (1 - SLACK) * budget.epsilon <= epsilon <= budget.epsilon
    return Calibration(cached.noise_multiplier, epsilon) if is_valid else None


def _check_bounds(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> None:
    check_bounds(sample_rate, steps, budget.delta, accountant)
    if steps > MOST_PLANNED_STEPS:
        raise InvalidValueError(
            "steps", steps, f"must be at most {MOST_PLANNED_STEPS:,} for a calibration"
        )
    if not SMALLEST_EPSILON <= budget.epsilon <= LARGEST_EPSILON:
        raise InvalidValueError(
            "epsilon",
            budget.epsilon,
            f"must be from {SMALLEST_EPSILON:g} to {LARGEST_EPSILON:g} for a calibration",
        )
    sampled = -math.expm1(steps * math.log1p(-sample_rate)) if sample_rate < 1 else 1.0
    if budget.delta >= sampled:
        raise InvalidValueError(
            "delta",
            budget.delta,
            f"must be below {sampled:.4g}, the probability that a record is sampled in any of "
            f"{steps} steps at sample_rate = {sample_rate:g}; a larger delta needs no noise at all",
        )


def _check_moments_floor(budget: PrivacyBudget, accountant: str) -> None:
    if accountant == "moments" and budget.epsilon <= moments_floor(budget.delta) * (1 + 1e-9):
        raise AccountingError(
            f"epsilon = {budget.epsilon:g} is below the floor {moments_floor(budget.delta):.4g} of "
            f"accountant 'moments' at delta = {budget.delta:g}, which no noise can reach; use "
            "accountant 'pld' or 'rdp', or a larger epsilon"
        )


def _search(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> Calibration:
    """Find z by secant steps on log epsilon against log z, kept inside a bracket.

    Where ``pld`` refines its grid, the search first comes near on the coarser grids, which cost a
    tenth; the finest grid is then evaluated once or twice.
    """
    target = (1 - SLACK / 2) * budget.epsilon
    bounds = (2 * _SMALLEST_Z, _LARGEST_Z / 2)
    z, slope = first_guess(budget, sample_rate, steps, RENYI.get(accountant), bounds, target)
    if accountant == "pld" and sample_rate < 1:
        for level, tolerance in enumerate(_TOLERANCE_ON_GRIDS):

            def rough(z: float, level: int = level) -> float | None:
                return _rough_epsilon(budget, sample_rate, z, steps, level)

            z, slope = _approach(rough, z, slope, target, tolerance)
    noisy, quiet = math.inf, 0.0  # smallest z known to be safe, largest z known to be too small
    previous = None
    for _ in range(100):
        epsilon = _epsilon_or_zero(budget, sample_rate, z, steps, accountant)
        if (1 - SLACK) * budget.epsilon <= epsilon <= budget.epsilon:
            return Calibration(z, epsilon)
        noisy, quiet = (min(noisy, z), quiet) if epsilon < target else (noisy, max(quiet, z))
        step = None
        if epsilon > 0:
            point = (math.log(z), math.log(epsilon / target))
            if previous is not None and point[0] != previous[0]:
                slope = (point[1] - previous[1]) / (point[0] - previous[0])
            previous = point
            if slope < -1e-3:
                step = point[0] - point[1] / slope
        if noisy < quiet * (1 + _JUMP):  # epsilon jumps over the target: take the safe side
            return Calibration(
                noisy, epsilon_of(sample_rate, noisy, steps, budget.delta, accountant)
            )
        z = _next(step, z, noisy, quiet)
        if not _SMALLEST_Z <= z <= _LARGEST_Z:
            break
    raise AccountingError(
        f"accountant '{accountant}' finds no noise multiplier between {_SMALLEST_Z:g} and "
        f"{_LARGEST_Z:g} for epsilon = {budget.epsilon:g}, delta = {budget.delta:g} over {steps} "
        f"steps at sample_rate = {sample_rate:g}; choose a more usual epsilon, or the method "
        "FedAvg to train without privacy"
    )


def _rough_epsilon(
    budget: PrivacyBudget, sample_rate: float, z: float, steps: int, level: int
) -> float | None:
    """Epsilon on one of the coarser grids of ``pld``; None if there is no such grid at this z."""
    if z < SMALLEST_PLD_NOISE:
        return None
    kinds = ((sample_rate, z, steps),)
    widths = grid_widths(kinds)
    if level >= len(widths) - 1:
        return None
    return pld_epsilon_on_grid(kinds, budget.delta, widths[level], large=True)


def _approach(
    rough: Callable[[float], float | None], z: float, slope: float, target: float, tolerance: float
) -> tuple[float, float]:
    """The z at which a rough epsilon is within ``tolerance`` of the target, and the slope there.

    Returns z and slope as they were if the grid does not exist or the search does not converge. The
    result is only a start for the search on the finest grid.
    """
    noisy, quiet, previous = math.inf, 0.0, None
    start = (z, slope)
    for _ in range(12):
        epsilon = rough(z)
        if epsilon is None:
            return start
        step = None
        if epsilon > 0:
            point = (math.log(z), math.log(epsilon / target))
            if previous is not None and point[0] != previous[0]:
                slope = min(-0.05, (point[1] - previous[1]) / (point[0] - previous[0]))
            if abs(point[1]) < tolerance:
                return math.exp(point[0] - point[1] / slope), slope
            previous = point
            step = point[0] - point[1] / slope
        noisy, quiet = (min(noisy, z), quiet) if epsilon < target else (noisy, max(quiet, z))
        z = _next(step, z, noisy, quiet)
    return start


def _next(step: float | None, z: float, noisy: float, quiet: float) -> float:
    """The secant's proposal if it lies inside the bracket, else a bisection or a doubling.

    Epsilon jumps at `SMALLEST_PLD_NOISE`, below which ``pld`` uses ``rdp``. If a narrow bracket
    holds this z, the search evaluates both sides of the jump.
    """
    if noisy < 1.1 * quiet and quiet < SMALLEST_PLD_NOISE <= noisy:
        return SMALLEST_PLD_NOISE * (1 - _JUMP / 2 if noisy == SMALLEST_PLD_NOISE else 1)
    if step is not None and abs(step - math.log(z)) < 3:
        proposal = math.exp(step)
        if quiet < proposal < noisy:
            return proposal
    if math.isinf(noisy):
        return z * 2
    if quiet == 0.0:
        return z / 2
    return math.sqrt(noisy * quiet)


def _epsilon_or_zero(
    budget: PrivacyBudget, sample_rate: float, z: float, steps: int, accountant: str
) -> float:
    """Epsilon for the search; 0 if the accountant fails because the noise is large."""
    try:
        return epsilon_of(sample_rate, z, steps, budget.delta, accountant)
    except AccountingError:
        if z < (SMALLEST_PLD_NOISE if accountant == "pld" else 0.3):
            raise
        return 0.0


def _key(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> str:
    parts = (accountant, version("dp-accounting"), budget.epsilon, budget.delta, sample_rate, steps)
    return "|".join(map(repr, parts))


def _cache_file() -> Path:
    # A changed search gets a new number, even if its results differ only within `SLACK`: a run's
    # results must not depend on what an earlier version cached on this machine.
    return cache_dir() / "calibration-3.jsonl"


@cache
def _read_cache(path: Path) -> dict[str, Calibration]:
    """All valid lines of the cache by key; invalid lines are skipped."""
    calibrations: dict[str, Calibration] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return calibrations
    for line in lines:
        try:
            entry = json.loads(line)
            calibrations[str(entry["key"])] = Calibration(
                float(entry["noise_multiplier"]), float(entry["epsilon"])
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return calibrations


def _append_cache(key: str, result: Calibration) -> None:
    """Append one line in one write, so that processes can share the file; ignore a failed write."""
    path = _cache_file()
    _read_cache(path)[key] = result
    # A line break comes first too: if the last line is incomplete, this line is still separate.
    line = "\n" + json.dumps({"key": key, **asdict(result)}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError:
        return
