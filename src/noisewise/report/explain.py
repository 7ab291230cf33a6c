"""A short text that explains the table of a comparison, with numbers of its runs only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from noisewise.federation.results import RunResult
from noisewise.report.cell_text import printable_run
from noisewise.report.disclosures import disclosure
from noisewise.report.tables import MethodRow, method_rows
from noisewise.text import list_text

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
    measured = [row for row in rows if math.isfinite(row.score)]
    ranked = sorted(measured, key=lambda row: row.metric.rank(row.score))
    if len(ranked) < 2:
        return ""
    best, metric = ranked[0], ranked[0].metric
    equal = [row for row in ranked if not _differ(best, row)]
    rest = [row for row in ranked if row not in equal]
    if len(equal) > 1:
        names = list_text([row.method for row in equal])
        return (
            f"{start}{names} have the same final {metric.name}, the {metric.best} of all methods"
            f"{excluded}{_noise(equal)}."
        )
    second = rest[0]
    seconds = [row for row in rest if not _differ(second, row)]
    gap = abs(best.score - second.score)
    pairs = [(best, row) for row in seconds]
    spreads = max(([r.spread for r in pair if math.isfinite(r.spread)] for pair in pairs), key=sum)
    error = math.sqrt(sum(s * s for s in spreads) / max(best.seeds, 1)) if spreads else 0.0
    points = f"{metric.number(gap)} {'percentage points' if metric.unit == '%' else metric.unit}"
    side, better = ("above", "higher") if metric.larger_is_better else ("below", "lower")
    text = (
        f"{start}{best.method} has the {metric.best} final {metric.name}{excluded}, "
        f"{points.rstrip()} {side} {list_text([row.method for row in seconds])}, the second best"
    )
    if spreads and gap <= error:
        unit = "points" if metric.unit == "%" else metric.unit
        these = "two" if len(seconds) == 1 else "methods"
        text += (
            f". The difference is within its standard error of {metric.number(error)} {unit}"
        ).rstrip() + f", so the comparison of these {these} is inconclusive"
    text += _noise([best, *seconds])
    if best.noise_ratio > 1.5 * second.noise_ratio:
        text += (
            f". Less noise did not give a {better} {metric.name} here: an update can have "
            "little noise because it took few local steps, and then it also has little signal"
        )
    return text + "."


def _differ(one: MethodRow, other: MethodRow) -> bool:
    """Whether two scores differ as they are printed."""
    gap = abs(one.score - other.score)
    return gap >= 0.0005 if one.metric.unit == "%" else gap > 1e-4 * abs(one.score)


def _noise(rows: Sequence[MethodRow]) -> str:
    """A sentence about the noise of methods, after a full stop; empty if one is not known."""
    if not all(math.isfinite(row.noise_ratio) for row in rows):
        return ""
    methods: dict[str, list[str]] = {}
    for row in rows:
        methods.setdefault(f"{row.noise_ratio:.4g}", []).append(row.method)
    parts = [
        f"{'' if ratio == '1' else f'{ratio} times '}the least possible for {list_text(names)}"
        for ratio, names in methods.items()
    ]
    return f". The noise in the combined update is {list_text(parts)}"


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
