"""Calibration: the smallest noise multiplier that keeps a budget, confirmed and cached on disk."""

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
from noisewise.privacy.accounting import (
    DEFAULT_ACCOUNTANT,
    RENYI,
    SMALLEST_PLD_NOISE,
    check_bounds,
    epsilon_of,
    grid_widths,
    moments_floor,
    pld_epsilon_on_grid,
)
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.first_guess import first_guess
from noisewise.storage import cache_dir

__all__ = ["Calibration", "calibrate"]

SLACK = 0.002
"""A calibrated plan may leave up to this share of its epsilon unused."""

LARGEST_EPSILON, SMALLEST_EPSILON, MOST_PLANNED_STEPS = 10_000.0, 0.01, 10_000_000
"""Bounds of a calibration, beside those of the accountants (`noisewise.privacy.accounting`)."""

_LARGEST_Z, _SMALLEST_Z = 1e6, 1e-3

_NEAR_ON_GRIDS = (0.05, 0.03)
"""How near to the aim the search comes on the first and the second grid."""

_JUMP = 1e-4
"""A bracket of this relative width around the target shows that the accountant jumps over it."""

version = cache(metadata.version)


@dataclass(frozen=True)
class Calibration:
    """A noise multiplier with the epsilon that it reaches, which is at most the target."""

    noise_multiplier: float
    epsilon: float


def calibrate(
    budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str = DEFAULT_ACCOUNTANT
) -> Calibration:
    """Find z such that ``steps`` steps at ``sample_rate`` spend at most ``budget``.

    The answer is safe, epsilon(z) <= budget.epsilon, and tight, within `SLACK` of it (for epsilons
    of many hundreds, where ``pld`` hands over to ``rdp``, it may be looser). A cached answer is
    confirmed by one evaluation before it is used, so a damaged cache can make it neither unsafe nor
    needlessly noisy.

    Within these bounds a first calibration takes at most 3 seconds of a processor's time
    (benchmarks/calibration.py):

    - ``budget.epsilon`` from 0.01 to 10,000; ``budget.delta`` below the chance that a record is
      ever sampled, and for ``pld`` at least 4.6e-16 times the steps;
    - ``sample_rate`` from 1e-6 to 1; ``steps`` at most 10^7.

    Raises:
        InvalidValueError: a value outside of these bounds.
        AccountingError: if no noise multiplier keeps the budget under this accountant.

    Example:
        >>> round(calibrate(PrivacyBudget(0.5, 1e-4), 32 / 2400, 15_000).noise_multiplier, 1)
        9.7
    """
    _check_bounds(budget, sample_rate, steps, accountant)
    _refuse_below_floor(budget, accountant)
    key = _key(budget, sample_rate, steps, accountant)
    known = _read_cache(_cache_file()).get(key)
    known = known and _confirmed(known, budget, sample_rate, steps, accountant)
    if known is not None:
        return known
    found = _search(budget, sample_rate, steps, accountant)
    _append_cache(key, found)
    return found


def _confirmed(
    known: Calibration, budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str
) -> Calibration | None:
    """A cached answer if an evaluation of our own finds it as safe and as tight as a search's."""
    try:
        epsilon = epsilon_of(sample_rate, known.noise_multiplier, steps, budget.delta, accountant)
    except NoisewiseError:
        return None
    sound = (1 - SLACK) * budget.epsilon <= epsilon <= budget.epsilon
    return Calibration(known.noise_multiplier, epsilon) if sound else None


def _check_bounds(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> None:
    check_bounds(sample_rate, steps, budget.delta, accountant)
    if steps > MOST_PLANNED_STEPS:
        raise InvalidValueError(
            "steps", steps, f"must be at most {MOST_PLANNED_STEPS:,} to calibrate noise for them"
        )
    if not SMALLEST_EPSILON <= budget.epsilon <= LARGEST_EPSILON:
        raise InvalidValueError(
            "epsilon",
            budget.epsilon,
            f"must be from {SMALLEST_EPSILON:g} to {LARGEST_EPSILON:g} to calibrate noise for it",
        )
    sampled = -math.expm1(steps * math.log1p(-sample_rate)) if sample_rate < 1 else 1.0
    if budget.delta >= sampled:
        raise InvalidValueError(
            "delta",
            budget.delta,
            f"must be below {sampled:.4g}, the chance that a record is sampled at all in {steps} "
            f"steps at sample_rate = {sample_rate:g}: else the budget holds without any noise",
        )


def _refuse_below_floor(budget: PrivacyBudget, accountant: str) -> None:
    if accountant == "moments" and budget.epsilon <= moments_floor(budget.delta) * (1 + 1e-9):
        raise AccountingError(
            f"epsilon = {budget.epsilon:g} is below the floor {moments_floor(budget.delta):.4g} of "
            f"accountant 'moments' at delta = {budget.delta:g}: no noise reaches it; use "
            "accountant 'pld' or 'rdp', or a larger epsilon"
        )


def _search(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> Calibration:
    """Secant steps on log epsilon against log z, kept inside a bracket.

    Where ``pld`` refines its grid, the search comes near on the coarser grids first: they cost a
    tenth, and the last grid is then asked once or twice.
    """
    aim = (1 - SLACK / 2) * budget.epsilon
    z, slope = first_guess(
        budget, sample_rate, steps, RENYI.get(accountant), (2 * _SMALLEST_Z, _LARGEST_Z / 2), aim
    )
    if accountant == "pld" and sample_rate < 1:
        for level, share in enumerate(_NEAR_ON_GRIDS):

            def rough(z: float, level: int = level) -> float | None:
                return _rough_epsilon(budget, sample_rate, z, steps, level)

            z, slope = _approach(rough, z, slope, aim, share)
    noisy, quiet = math.inf, 0.0  # z known to be safe, z known to be too small
    previous = None
    for _ in range(100):
        epsilon = _epsilon_or_zero(budget, sample_rate, z, steps, accountant)
        if (1 - SLACK) * budget.epsilon <= epsilon <= budget.epsilon:
            return Calibration(z, epsilon)
        noisy, quiet = (min(noisy, z), quiet) if epsilon < aim else (noisy, max(quiet, z))
        step = None
        if epsilon > 0:
            point = (math.log(z), math.log(epsilon / aim))
            if previous is not None and point[0] != previous[0]:
                slope = (point[1] - previous[1]) / (point[0] - previous[0])
            previous = point
            if slope < -1e-3:
                step = point[0] - point[1] / slope
        if noisy < quiet * (1 + _JUMP):  # the accountant jumps over the target: the safe side
            return Calibration(
                noisy, epsilon_of(sample_rate, noisy, steps, budget.delta, accountant)
            )
        z = _next(step, z, noisy, quiet)
        if not _SMALLEST_Z <= z <= _LARGEST_Z:
            break
    raise AccountingError(
        f"accountant '{accountant}' finds no noise multiplier between {_SMALLEST_Z:g} and "
        f"{_LARGEST_Z:g} for epsilon = {budget.epsilon:g}, delta = {budget.delta:g} over {steps} "
        f"steps at sample_rate = {sample_rate:g}; choose an epsilon closer to usual ones, or the "
        "method FedAvg for no privacy at all"
    )


def _rough_epsilon(
    budget: PrivacyBudget, sample_rate: float, z: float, steps: int, level: int
) -> float | None:
    """Epsilon on one of the coarser grids of ``pld``; None if there is no such grid at this z."""
    if z < SMALLEST_PLD_NOISE:
        return None
    grids = grid_widths(sample_rate, z, steps)
    if level >= len(grids) - 1:
        return None
    return pld_epsilon_on_grid(sample_rate, z, steps, budget.delta, grids[level], large=True)


def _approach(
    rough: Callable[[float], float | None], z: float, slope: float, aim: float, share: float
) -> tuple[float, float]:
    """Where a rough epsilon comes within ``share`` of the aim, and the slope there.

    Nothing is promised from it. It ends where there is no such grid, and leaves z as it was if the
    rough epsilon is of no use.
    """
    noisy, quiet, previous = math.inf, 0.0, None
    start = (z, slope)
    for _ in range(12):
        epsilon = rough(z)
        if epsilon is None:
            return start
        step = None
        if epsilon > 0:
            point = (math.log(z), math.log(epsilon / aim))
            if previous is not None and point[0] != previous[0]:
                slope = min(-0.05, (point[1] - previous[1]) / (point[0] - previous[0]))
            if abs(point[1]) < share:
                return math.exp(point[0] - point[1] / slope), slope
            previous = point
            step = point[0] - point[1] / slope
        noisy, quiet = (min(noisy, z), quiet) if epsilon < aim else (noisy, max(quiet, z))
        z = _next(step, z, noisy, quiet)
    return start


def _next(step: float | None, z: float, noisy: float, quiet: float) -> float:
    """The secant's proposal if it lies well inside the bracket, else a bisection or a doubling.

    A narrow bracket around the noise where ``pld`` hands over to ``rdp`` closes on it from both
    sides.
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
    """Epsilon for the search, where an accountant's refusal at large noise means "too noisy"."""
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
    # A search that answers otherwise, if only within `SLACK`, gets a new number: what a machine
    # once cached must not decide the figures of a run.
    return cache_dir() / "calibration-3.jsonl"


@cache
def _read_cache(path: Path) -> dict[str, Calibration]:
    """All readable lines; a torn or foreign line is passed over."""
    found: dict[str, Calibration] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            entry = json.loads(line)
            found[str(entry["key"])] = Calibration(
                float(entry["noise_multiplier"]), float(entry["epsilon"])
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return found


def _append_cache(key: str, found: Calibration) -> None:
    """Append one line in one write, so that processes can share the file; no disk, no cache."""
    path = _cache_file()
    _read_cache(path)[key] = found
    # The line break comes first as well, lest a torn last line swallow this one.
    line = "\n" + json.dumps({"key": key, **asdict(found)}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError:
        return
