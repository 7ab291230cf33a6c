"""Calibration: the smallest noise multiplier that keeps a budget, confirmed and cached on disk."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from noisewise.checks import fraction, positive_int
from noisewise.errors import AccountingError, NoisewiseError
from noisewise.privacy.accounting import DEFAULT_ACCOUNTANT, RENYI, epsilon_of, moments_floor
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.first_guess import first_guess
from noisewise.storage import cache_dir

__all__ = ["Calibration", "calibrate"]

SLACK = 0.002
"""A calibrated plan may leave up to this share of its epsilon unused."""

_LARGEST_Z, _SMALLEST_Z = 1e6, 1e-3

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

    Raises:
        AccountingError: if no noise multiplier keeps the budget under this accountant.

    Example:
        >>> round(calibrate(PrivacyBudget(0.5, 1e-4), 32 / 2400, 15_000).noise_multiplier, 1)
        9.7
    """
    fraction("sample_rate", sample_rate)
    positive_int("steps", steps)
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


def _refuse_below_floor(budget: PrivacyBudget, accountant: str) -> None:
    if accountant == "moments" and budget.epsilon <= moments_floor(budget.delta) * (1 + 1e-9):
        raise AccountingError(
            f"epsilon = {budget.epsilon:g} is below the floor {moments_floor(budget.delta):.4g} of "
            f"accountant 'moments' at delta = {budget.delta:g}: no noise reaches it; use "
            "accountant 'pld' or 'rdp', or a larger epsilon"
        )


def _search(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> Calibration:
    """Secant steps on log epsilon against log z, kept inside a bracket."""
    aim = (1 - SLACK / 2) * budget.epsilon
    z, slope = first_guess(
        budget, sample_rate, steps, RENYI.get(accountant), (2 * _SMALLEST_Z, _LARGEST_Z / 2), aim
    )
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
        if noisy < quiet * (1 + 1e-9):  # the accountant jumps over the target: take the safe side
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


def _next(step: float | None, z: float, noisy: float, quiet: float) -> float:
    """The secant's proposal if it lies well inside the bracket, else a bisection or a doubling."""
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
        if z < 0.3:
            raise
        return 0.0


def _key(budget: PrivacyBudget, sample_rate: float, steps: int, accountant: str) -> str:
    parts = (accountant, version("dp-accounting"), budget.epsilon, budget.delta, sample_rate, steps)
    return "|".join(map(repr, parts))


def _cache_file() -> Path:
    # A search that answers otherwise, if only within `SLACK`, gets a new number: what a machine
    # once cached must not decide the figures of a run.
    return cache_dir() / "calibration-2.jsonl"


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
