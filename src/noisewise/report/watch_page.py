"""The page of `noisewise watch`: progress on top, the report of the rounds so far below."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from noisewise import __version__
from noisewise.federation.missing_updates import causes_of
from noisewise.federation.results import RunResult
from noisewise.report.cell_text import printable_run
from noisewise.report.chart import Table
from noisewise.report.comparison_report import charts_of
from noisewise.report.html import template_environment
from noisewise.report.inline_svg import css_colours
from noisewise.report.live_progress import Progress, RunProgress
from noisewise.report.page import STATUS_TEXT, Section, render_page
from noisewise.report.run_sets import find_runs
from noisewise.report.sweep_report import overview_chart, overview_table
from noisewise.text import printable

__all__ = ["live_report", "progress_html", "script_text", "watch_page"]

_STATE_TEXT = {
    "waiting": "has not begun",
    "starting": "is starting",
    "training": "training",
    "stopped": "stopped: run the same command again to resume",
    "silent": "no round for some time",
    "unreadable": "its files are damaged or too large to show",
}
_LISTED = 12  # runs whose participation is shown; the others are in the report


@dataclass(frozen=True)
class _Participation:
    """Who took part in a run: a heading, a sentence and a table of clients that missed rounds."""

    heading: str
    sentence: str
    table: Table | None


def watch_page(title: str) -> str:
    """Return the page that loads progress and report, as HTML text."""
    template = template_environment().get_template("watch.html")
    return template.render(
        title=title,
        light=css_colours(dark=False),
        dark=css_colours(dark=True),
        version=__version__,
    )


def script_text() -> str:
    """Return the script of the page."""
    environment = template_environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, "watch.js")[0]


def progress_html(progress: Progress, now: float) -> str:
    """Return the upper part of the page.

    Args:
        progress: of the watched folder.
        now: seconds since 1970 (UTC).
    """
    begun = [run for run in progress.runs if run.result is not None and run.result.rounds]
    shown = [run for run in begun if run.state != "ended" or run.result is None or _missed(run)]
    runs = shown or begun[-1:]
    template = template_environment().get_template("watch_progress.html")
    return template.render(
        progress=progress,
        sentence=_sentence(progress, now),
        percent=100 * progress.done // progress.planned if progress.planned else 0,
        runs=_run_table(progress.runs),
        participation=[_participation(run, _comparison(run)) for run in runs[-_LISTED:]],
        n_left_out=max(0, len(runs) - _LISTED),
    )


def live_report(run_folders: Sequence[Path], title: str) -> str:
    """Return the report page of the runs so far, without writing a file.

    Args:
        run_folders: of the runs.
        title: of the page.

    Raises:
        InvalidValueError: no run has begun.
    """
    run_sets = find_runs(run_folders)
    sets = [
        replace(
            one,
            name=printable(one.name),
            folder=printable(one.folder),
            results=tuple(map(printable_run, one.results)),
        )
        for one in run_sets.sets
    ]
    sections = [Section(one, charts_of(one.results, one.times)) for one in sets]
    overview = None if len(sets) == 1 else (overview_chart(sets), overview_table(sets))
    return render_page(title, sections, overview, run_sets.notes)


def _sentence(progress: Progress, now: float) -> str:
    if progress.state == "waiting":
        return "Waiting: this folder contains no run yet."
    n_ended = sum(run.state == "ended" for run in progress.runs)
    rounds = f"{progress.done} of {progress.planned} rounds, {_runs(n_ended, len(progress.runs))}"
    if progress.state == "ended":
        statuses = Counter(run.result.status for run in progress.runs if run.result is not None)
        others = [f"{n} {STATUS_TEXT.get(s, s)}" for s, n in statuses.items() if s != "finished"]
        end = "The runs have ended" if others else "Finished"
        return f"{end} at {_clock(progress.changed)}: {'; '.join([rounds, *others])}."
    if progress.state == "stopped":
        return (
            f"Stopped: no process trains these runs. No progress since {_clock(progress.changed)} "
            f"({duration(now - progress.changed)} ago): {rounds}. Run the same command again to "
            "resume."
        )
    parts = [f"Training: {rounds}"]
    left = progress.seconds_left
    if math.isfinite(left):
        parts.append(f"about {duration(left)} left")
    if progress.silent:
        since = f"{_clock(progress.changed)} ({duration(progress.silent)} ago)"
        parts.append(f"no round has ended since {since}")
    return f"{'; '.join(parts)}."


def _runs(ended: int, total: int) -> str:
    return f"{ended} of {total} run{'s' * (total != 1)} ended"


def _clock(moment: float) -> str:
    """Return the time of day; with the date if it is not today."""
    if math.isnan(moment):
        return "the start"
    then = time.localtime(moment)
    same_day = time.strftime("%F", then) == time.strftime("%F")
    return time.strftime("%H:%M:%S" if same_day else "%F %H:%M:%S", then)


def duration(seconds: float) -> str:
    """Return a time in words, such as ``3 min 20 s``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _run_table(runs: Sequence[RunProgress]) -> Table:
    several = len({_comparison(run) for run in runs}) > 1
    rows = []
    for run in runs:
        result = run.result
        state = _STATE_TEXT.get(run.state, run.state)
        if run.state == "ended" and result is not None:
            state = STATUS_TEXT.get(result.status, result.status)
        left = run.seconds_left if run.state == "training" else math.nan
        cells = [
            run.method,
            "" if run.seed is None else str(run.seed),
            state,
            f"{run.done} of {run.planned}",
            _score(result),
            _last_round(result),
            duration(left) if math.isfinite(left) else "",
        ]
        rows.append((*([_comparison(run)] if several else []), *cells))
    headings = ("method", "seed", "state", "rounds", "score so far", "last round", "time left")
    return Table((*(("folder",) if several else ()), *headings), tuple(rows))


def _comparison(run: RunProgress) -> str:
    """The folder of the run's comparison, relative to the watched folder."""
    return f"/{run.folder}".rpartition("/runs/")[0].lstrip("/")


def _score(result: RunResult | None) -> str:
    if result is None or math.isnan(result.score):
        return "not measured"
    return f"{result.metric.name} {result.metric.text(result.score)}"


def _last_round(result: RunResult | None) -> str:
    if result is None or not result.rounds:
        return ""
    last = result.rounds[-1]
    dropped = f", {len(last.dropped)} dropped" if last.dropped else ""
    if not result.shares_model:
        return f"{len(last.used)} clients trained alone, nothing was sent{dropped}"
    return f"{len(last.used)} updates used{dropped}"


def _missed(run: RunProgress) -> bool:
    return run.result is not None and any(record.dropped for record in run.result.rounds)


def _participation(run: RunProgress, comparison: str) -> _Participation:
    """Who took part in a run of a comparison and who was dropped, with the reasons."""
    result = run.result
    assert result is not None
    records, word = result.rounds, "site" if result.deployed else "client"
    n_asked: Counter[str] = Counter(
        client for record in records for client in {*record.weights, *record.dropped}
    )
    used = Counter(client for record in records for client in record.used)
    reasons: dict[str, str] = {}
    for record in records:
        reasons |= record.dropped  # the last reason
    heading = f"{comparison}: " * bool(comparison) + f"{result.method}, seed {result.seed}"
    n_rounds = f"{len(records)} round{'s' * (len(records) != 1)}"
    if not reasons and all(count == len(records) for count in n_asked.values()):
        sentence = f"All {len(n_asked)} {word}s took part in each of the {n_rounds}."
        return _Participation(heading, sentence, None)
    causes = "; ".join(
        f"{cause.reason} ({cause.updates} update{'s' * (cause.updates != 1)} of {cause.clients} "
        f"{word}{'s' * (cause.clients != 1)})"
        for cause in causes_of(records)
    )
    counted = "updates used" if result.shares_model else "rounds trained alone"
    sentence = f"{sum(used.values())} {counted} in {n_rounds}."
    if causes:
        sentence += f" Not used: {causes}."
    rows = tuple(
        (client, f"{used[client]} of {n_asked[client]}", reasons.get(client, ""))
        for client in sorted(n_asked, key=lambda c: (used[c] - n_asked[c], c))
    )
    return _Participation(
        heading, sentence, Table((word, counted, "last reason for dropping"), rows)
    )
