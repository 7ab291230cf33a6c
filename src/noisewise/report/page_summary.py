"""The top of a report: what was run, when, with which privacy, and the verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from noisewise.federation.results import RunResult
from noisewise.federation.round_times import RoundTime
from noisewise.report.disclosures import disclosure
from noisewise.report.paired import (
    DISCLOSED,
    NOTHING,
    REFERENCE,
    best_methods,
    mean_score,
    method_groups,
    paired_difference,
)
from noisewise.report.run_sets import RunSet, flatten_config
from noisewise.report.tables import by_method
from noisewise.text import list_text

__all__ = ["PageSummary", "duration_text", "page_summary", "sweep_verdict", "time_text", "verdict"]


@dataclass(frozen=True)
class PageSummary:
    """What the top of a page says.

    Attributes:
        title: what was run, in a few words.
        facts: pairs (name, text), in their order.
    """

    title: str
    facts: tuple[tuple[str, str], ...]


def page_summary(sets: Sequence[RunSet]) -> PageSummary:
    """Return the title and the facts of a page about sets of runs.

    Args:
        sets: sets of runs; each is one comparison.
    """
    runs = [run for one in sets for run in one.results]
    configs = [flatten_config(one.config) for one in sets]
    deployed = any(run.deployed for run in runs)
    facts = [
        ("Date", _date(time for one in sets for times in one.times.values() for time in times)),
        ("Data", _joined(_data(config) for config in configs)),
        ("Model", _joined(_model(config) for config in configs)),
        ("Sites" if deployed else "Clients", _clients(runs)),
        ("Rounds", _rounds(runs)),
        ("Privacy", _privacy(runs)),
    ]
    return PageSummary(_title(sets, configs), tuple((name, text) for name, text in facts if text))


def _joined(texts: Iterable[str]) -> str:
    different = list(dict.fromkeys(filter(None, texts)))
    return "; ".join(different[:3]) + (f"; {len(different) - 3} more" if len(different) > 3 else "")


def _title(sets: Sequence[RunSet], configs: Sequence[dict[str, Any]]) -> str:
    runs = [run for one in sets for run in one.results]
    data = _joined(str(config.get("data.name") or "") for config in configs)
    model = _joined(str(config.get("model.name") or "") for config in configs)
    methods = list(by_method(runs))
    content = f"{len(methods)} methods compared" if len(methods) > 1 else methods[0]
    if len(sets) > 1:
        content += f", {len(sets)} settings"
    subject = f"{data}, model {model}" if data and model else data or model
    if not subject:
        subject = "Real federation" if any(run.deployed for run in runs) else ""
    return f"{subject}: {content}" if subject else content[0].upper() + content[1:]


def time_text(seconds: float) -> str:
    """Return a time as text in UTC, for example ``2026-11-18 15:20``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def duration_text(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration_text(4.25), duration_text(75), duration_text(7300)
        ('4.2 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _date(times: Iterable[RoundTime]) -> str:
    times = list(times)
    if not times:
        return "not recorded"
    began, ended = min(time.began for time in times), max(time.ended for time in times)
    first, last = time_text(began), time_text(ended)
    if last != first:
        same_day = last[:10] == first[:10]
        first += f" to {last[11:] if same_day else last}"
    return f"{first} UTC ({duration_text(ended - began)})"


def _data(config: dict[str, Any]) -> str:
    name, features = config.get("data.name"), config.get("features.name")
    text = str(name or "")
    if features:
        text += f", features {features}"
    if partition := config.get("data.partition"):
        text += f", partition {partition}"
    return text.removeprefix(", ")


def _model(config: dict[str, Any]) -> str:
    return str(config.get("model.name") or "")


def _range(values: Iterable[float], form: str = "g") -> str:
    values = sorted(set(values))
    if not values:
        return ""
    low, high = f"{values[0]:{form}}", f"{values[-1]:{form}}"
    return low if low == high else f"{low} to {high}"


def _clients(runs: Sequence[RunResult]) -> str:
    counts = _range((len(run.clients) for run in runs), "d")
    if any(run.deployed for run in runs):
        return counts
    records = [
        facts["n_examples"]
        for run in runs
        for facts in run.clients.values()
        if "n_examples" in facts
    ]
    return counts + (f", each with {_range(records, ',d')} training records" if records else "")


def _rounds(runs: Sequence[RunResult]) -> str:
    rounds = _range((int(run.settings.get("rounds", len(run.rounds))) for run in runs), "d")
    seeds = len({run.seed for run in runs})
    if all(run.deployed for run in runs):
        return rounds
    return f"{rounds}; {seeds} seed{'s' * (seeds != 1)} of each method"


def _privacy(runs: Sequence[RunResult]) -> str:
    if any(run.deployed for run in runs):
        return "not known to the server; what sites declare is listed below"
    private = [run for run in runs if run.guarantee is not None]
    if not private:
        return "none: the updates have no noise"
    facts = [facts for run in private for facts in run.clients.values()]
    epsilons = _range(f["epsilon"] for f in facts if "epsilon" in f)
    deltas = _range(f["delta"] for f in facts if "delta" in f)
    units = {str(f.get("unit") or run.settings.get("unit") or "record")
             for run in private for f in run.clients.values()}  # fmt: skip
    accountants = {str(run.settings.get("accountant", "unknown")) for run in private}
    return (
        f"epsilon {epsilons} and delta {deltas} for each client, unit: one "
        f"{' or '.join(sorted(units))}, accountant {', '.join(sorted(accountants))}"
    )


def verdict(results: Sequence[RunResult]) -> str:
    """Return the result of a comparison in one sentence; empty without a measured method.

    Args:
        results: runs of one or more methods and seeds.
    """
    groups, grouped = method_groups(results), by_method(results)
    best = best_methods(results)
    if not best or best[0] in groups.get(REFERENCE, ()):
        return ""
    private = [m for name in (NOTHING, DISCLOSED) for m in groups.get(name, ())]
    metric = grouped[best[0]][0].metric
    value = f"{metric.name} {metric.text(mean_score(grouped[best[0]]))}"
    if len(private) == 1:
        return f"{best[0]} reaches {value}; there is no other private method to compare it with."
    group = NOTHING if best[0] in groups.get(NOTHING, ()) else DISCLOSED
    one = len(best) == 1
    start = f"{list_text(best)} {'is the best method' if one else 'are the best methods'} that "
    if group == NOTHING:
        start += f"need{'s' * one} no disclosures ({value})"
    else:
        start += f"{'is' if one else 'are'} private ({value})"
    others = best_methods(results, DISCLOSED) if group == NOTHING else ()
    if others:
        needs = {disclosure(need).short for name in others for need in grouped[name][0].needs}
        role = "method that needs" if len(others) == 1 else "methods that need"
        against = (
            f"{list_text(others)}, the best {role} disclosures ({' and '.join(sorted(needs))})"
        )
    else:
        rest = [run for run in results if run.method in set(groups[group]) - set(best)]
        others = best_methods(rest)
        if not others:
            return f"{start}; no other private method was measured."
        against = f"{list_text(others)}, the second best"
    return f"{start}; {_compared(results, best, others[0], against)}"


def _compared(results: Sequence[RunResult], best: Sequence[str], other: str, against: str) -> str:
    """The difference of the best methods to another one, with its meaning."""
    differences = [paired_difference(results, method, other) for method in best]
    difference = differences[0]
    n = len(difference.values)
    if not n:
        return f"{'it has' if len(best) == 1 else 'they have'} no seed in common with {against}."
    whose = "its" if len(best) == 1 else "their"
    if any(each.values != difference.values for each in differences):
        whose = f"{best[0]}'s"  # equal means, but other scores of the seeds
    text = f"{whose} difference to {against}, is {difference.text()}"
    if n == 1:
        return f"{text} with one seed: inconclusive."
    text += f" (mean ± paired standard error over {n} seeds)"
    if difference.conclusive:
        better = (difference.mean > 0) == difference.metric.larger_is_better
        return f"{text}: {'better' if better else 'worse'} by more than two standard errors."
    return f"{text}: inconclusive."


def sweep_verdict(sets: Sequence[RunSet]) -> str:
    """Return in how many settings each method is the best, in one sentence; empty if in none.

    Args:
        sets: sets of runs; each is one comparison.
    """
    wins: dict[str, int] = {}
    judged = 0
    for one in sets:
        best = best_methods(one.results)
        if not best or best[0] in method_groups(one.results).get(REFERENCE, ()):
            continue
        judged += 1
        for method in best:
            wins[method] = wins.get(method, 0) + 1
    if not judged:
        return ""
    ranked = sorted(wins, key=lambda method: -wins[method])
    settings = f"{judged} setting{'s' * (judged != 1)}"
    first, *rest = ranked
    text = list_text([f"{first} is best in {wins[first]}", *(f"{m} in {wins[m]}" for m in rest)])
    return (
        f"{text} of {settings}, among the methods that need no disclosures (among the others if "
        "there are none). Methods with equal scores all count."
    )
