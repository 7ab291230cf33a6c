"""The reason behind a comparison's table, in words and only with figures that the runs gave."""

from __future__ import annotations

import math
from collections.abc import Sequence

from noisewise.federation.results import RunResult
from noisewise.report.cells import printable_run
from noisewise.report.disclosures import disclosure
from noisewise.report.tables import MethodRow, method_rows

__all__ = ["explain"]

_REFERENCES = ("FedAvg", "Oracle")


def explain(results: Sequence[RunResult]) -> str:
    """A few sentences: how different the noise is, who got the weight, and what came of it."""
    results = [printable_run(result) for result in results]
    rows = {row.method: row for row in method_rows(results)}
    # A server does not know the budgets of real sites, let alone whether they are the same.
    start = "" if any(run.deployed for run in results) else "At the same budgets "
    outcome = _outcome(rows, start)
    paragraphs = [_noise_levels(results), _weights(results), outcome, _references(rows)]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _noise_levels(results: Sequence[RunResult]) -> str:
    run = next((r for r in results if _private(r) and r.method != "MinEpsilon" and r.rounds), None)
    noise = run.rounds[0].true_noise if run is not None else {}
    if run is None or not noise or not all(0 < v < math.inf for v in noise.values()):
        return ""
    epsilons = [client["epsilon"] for client in run.clients.values()]
    factor = max(noise.values()) / min(noise.values())
    return (
        f"Every client keeps a budget of its own (epsilon {min(epsilons):g} to {max(epsilons):g}) "
        "and adds the noise that this budget, its batch size and its number of records demand. "
        f"The noisiest update carries {factor:,.0f} times the noise energy of the quietest one."
    )


def _weights(results: Sequence[RunResult]) -> str:
    lines = []
    for method in dict.fromkeys(r.method for r in results if _private(r) and r.rounds):
        run = next(r for r in results if r.method == method)
        first = run.rounds[0]
        if method == "MinEpsilon" or first.aggregate_noise is None:
            continue
        ranked = sorted(first.true_noise, key=lambda client: first.true_noise[client])
        noisy = ranked[len(ranked) // 2 :]
        share = 100 * sum(first.weights[client] for client in noisy)
        told = " and ".join(disclosure(need).short for need in run.needs) or "nothing"
        lines.append(f"  {method}: {share:.1f} % (told {told})")
    if not lines:
        return ""
    return "Weight that the noisier half of the clients gets:\n" + "\n".join(lines)


def _outcome(rows: dict[str, MethodRow], start: str) -> str:
    private = {m: r for m, r in rows.items() if m not in _REFERENCES and math.isfinite(r.accuracy)}
    if len(private) < 2:
        return ""
    ranked = sorted(private.values(), key=lambda row: -row.accuracy)
    best, second = ranked[0], ranked[1]
    gap = 100 * (best.accuracy - second.accuracy)
    spreads = [row.spread for row in (best, second) if math.isfinite(row.spread)]
    error = 100 * math.sqrt(sum(s * s for s in spreads) / max(best.seeds, 1)) if spreads else 0.0
    words = (
        f"{start}{best.method} ends {gap:.1f} points ahead of {second.method}, the next best"
        if gap >= 0.05
        else f"{start}{best.method} and {second.method} end level"
    )
    if gap >= 0.05 and spreads and gap <= error:
        words += f", which is within the standard error of {error:.1f} points: no winner"
    if math.isfinite(best.noise_ratio) and math.isfinite(second.noise_ratio):
        words += (
            f". {best.method}'s aggregate has {best.noise_ratio:.4g} times the least noise, "
            f"{second.method}'s {second.noise_ratio:.4g} times"
        )
        if best.noise_ratio > 1.5 * second.noise_ratio:
            words += (
                ". Less noise did not win here: an update can be quiet because it took few local "
                "steps, and then it carries little signal as well"
            )
    return words + "."


def _references(rows: dict[str, MethodRow]) -> str:
    notes = []
    if "Oracle" in rows:
        notes.append("Oracle knows the true noise, which no server does")
    if "FedAvg" in rows:
        notes.append("FedAvg has no privacy at all")
    if "PFA" in rows:
        notes.append("the noise of PFA's projected aggregate has no closed form")
    return ("For reference: " + "; ".join(notes) + ".") if notes else ""


def _private(result: RunResult) -> bool:
    return result.guarantee is not None
