"""A short text that explains the table of a comparison, with numbers of its runs only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from noisewise.federation.results import RunResult
from noisewise.report.cell_text import printable_run
from noisewise.report.disclosures import disclosure
from noisewise.report.tables import MethodRow, method_rows

__all__ = ["explain"]


def explain(results: Sequence[RunResult]) -> str:
    """Explain a comparison: how much the noise differs, the weights, and the accuracies.

    Args:
        results: the runs of the comparison.

    Returns:
        Paragraphs, separated by empty lines.
    """
    results = [printable_run(result) for result in results]
    rows = {row.method: row for row in method_rows(results)}
    # A server does not know the budgets of real sites, so it cannot say that they are the same.
    start = "" if any(run.deployed for run in results) else "With the same budgets, "
    references = {run.method for run in results if run.is_reference}
    ranked = [row for row in rows.values() if row.method not in references]
    outcome = _outcome(ranked, start, " (apart from the references)" if references else "")
    own_models = {run.method for run in results if not run.shares_model}
    notes = _references(rows, own_models)
    paragraphs = [_noise_levels(results), _weights(results), outcome, notes]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _noise_levels(results: Sequence[RunResult]) -> str:
    run = next((r for r in results if _private(r) and r.own_budgets and r.rounds), None)
    noise = run.rounds[0].true_noise if run is not None else {}
    if run is None or not noise or not all(0 < v < math.inf for v in noise.values()):
        return ""
    epsilons = [client["epsilon"] for client in run.clients.values()]
    factor = max(noise.values()) / min(noise.values())
    return (
        f"Every client has its own budget (epsilon {min(epsilons):g} to {max(epsilons):g}) and "
        "adds the noise that this budget, its batch size and its number of records require. The "
        f"noisiest update has {factor:,.0f} times the noise energy of the least noisy one."
    )


def _weights(results: Sequence[RunResult]) -> str:
    lines = []
    for method in dict.fromkeys(r.method for r in results if _private(r) and r.rounds):
        run = next(r for r in results if r.method == method)
        first = run.rounds[0]
        if not run.own_budgets or first.aggregate_noise is None:
            continue
        ranked = sorted(first.true_noise, key=lambda client: first.true_noise[client])
        noisy = ranked[len(ranked) // 2 :]
        share = 100 * sum(first.weights[client] for client in noisy)
        disclosed = " and ".join(disclosure(need).short for need in run.needs) or "nothing"
        lines.append(f"  {method}: {share:.1f} % (disclosed to the server: {disclosed})")
    if not lines:
        return ""
    return "Total weight of the noisier half of the clients:\n" + "\n".join(lines)


def _outcome(rows: Sequence[MethodRow], start: str, excluded: str) -> str:
    ranked = sorted((r for r in rows if math.isfinite(r.accuracy)), key=lambda row: -row.accuracy)
    if len(ranked) < 2:
        return ""
    best, second = ranked[0], ranked[1]
    gap = 100 * (best.accuracy - second.accuracy)
    spreads = [row.spread for row in (best, second) if math.isfinite(row.spread)]
    error = 100 * math.sqrt(sum(s * s for s in spreads) / max(best.seeds, 1)) if spreads else 0.0
    text = (
        f"{start}{best.method} has the highest final accuracy{excluded}, {gap:.1f} percentage "
        f"points above {second.method}, the second best"
        if gap >= 0.05
        else f"{start}{best.method} and {second.method} have the same final accuracy, the highest "
        f"of all methods{excluded}"
    )
    if gap >= 0.05 and spreads and gap <= error:
        text += (
            f". The difference is within its standard error of {error:.1f} points, so the "
            "comparison of these two is inconclusive"
        )
    if math.isfinite(best.noise_ratio) and math.isfinite(second.noise_ratio):
        text += (
            f". The noise in the combined update is {best.noise_ratio:.4g} times the least "
            f"possible for {best.method} and {second.noise_ratio:.4g} times for {second.method}"
        )
        if best.noise_ratio > 1.5 * second.noise_ratio:
            text += (
                ". Less noise did not give a higher accuracy here: an update can have little noise "
                "because it took few local steps, and then it also has little signal"
            )
    return text + "."


def _references(rows: Mapping[str, MethodRow], own_models: Set[str]) -> str:
    notes = [f"under {method} every client has its own model" for method in sorted(own_models)]
    if "Oracle" in rows:
        notes.append("Oracle uses the true noise, which no real server knows")
    if "FedAvg" in rows:
        notes.append("FedAvg has no privacy")
    if "PFA" in rows:
        notes.append("the noise of PFA's combined update has no closed form")
    return ("For reference: " + "; ".join(notes) + ".") if notes else ""


def _private(result: RunResult) -> bool:
    return result.guarantee is not None
