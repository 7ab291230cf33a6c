"""`noisewise run` and `noisewise compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import (
    AsJson,
    Config,
    Output,
    Set,
    Sweep,
    Workers,
    app,
    cores,
    output_folder,
    overrides,
    say,
    swept_values,
    words,
)

if TYPE_CHECKING:
    from noisewise.experiments.comparison import Comparison
    from noisewise.experiments.sweep import SweepPoint
    from noisewise.federation.results import RunResult


@app.command("run")
def run_command(
    config: Config,
    method: Annotated[
        str | None, typer.Option(help="One of `noisewise methods`, or your own.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    output: Output = None,
    workers: Workers = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time goes; writes timing.json.")
    ] = False,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train once with one method. Run it again to go on after an interruption.

    Examples:
      noisewise run configs/demo.toml

      noisewise run configs/demo.toml --method WeiAvg --seed 3 --set training.rounds=10

      noisewise run configs/demo.toml --profile --set training.executor=processes
    """
    from noisewise.display import run_display
    from noisewise.experiments.comparison import comparison_jobs
    from noisewise.experiments.config import dump_config, load_config
    from noisewise.experiments.preflight import check_folder
    from noisewise.experiments.runner import Job, run
    from noisewise.federation.causes import no_updates_text
    from noisewise.federation.results import to_json
    from noisewise.federation.timing import Stopwatch
    from noisewise.report.tables import as_text, method_rows
    from noisewise.report.timing import report_timing
    from noisewise.storage import write_atomic

    wanted = load_config(config, overrides(settings))
    chosen = wanted.method
    if method is not None:
        chosen = comparison_jobs(wanted, [method], 1)[0].method
    job = Job(chosen, wanted.seed if seed is None else seed)
    folder = output_folder(output, config) / job.folder_name
    check_folder(wanted, folder, [folder])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.toml", dump_config(wanted).encode())
    with run_display(job, wanted.training.rounds, quiet=as_json) as on_round:
        clock = Stopwatch()
        hands = workers or cores()
        result = run(wanted, job, folder=folder, workers=hands, on_round=on_round, clock=clock)
    if profile:
        say(report_timing(clock, folder) + "\n", err=as_json)
    if as_json:
        say(to_json(result.summary()))
    else:
        say(as_text(method_rows([result])))
        say(f"\nstatus: {result.status}; results in {folder}")
    if result.status == "no_updates":
        say(f"noisewise: {no_updates_text(result.rounds)}", err=True)
        raise typer.Exit(1)


@app.command("compare")
def compare_command(
    config: Config,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, instead of the config's; your own as package.module:name."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each method, instead of the config's.")
    ] = None,
    output: Output = None,
    workers: Workers = None,
    settings: Sweep = None,
    as_json: AsJson = False,
) -> None:
    """Train with several methods and seeds and put them side by side, on a page with figures.

    Methods under one seed share the split, the initial model and the sampling. Interrupted
    comparisons go on where they stopped. A field with several values is swept: one comparison for
    each value, each in a folder of its own, and a page over all.

    Examples:
      noisewise compare configs/demo.toml

      noisewise compare configs/demo.toml --methods RobustHDP,WeiAvg --seeds 5

      noisewise compare configs/demo.toml --set training.clip_norm=0.5,1,2
    """
    from noisewise.experiments.comparison import check_output
    from noisewise.experiments.sweep import sweep_points

    points = sweep_points(config, swept_values(settings), words("--methods", methods), seeds)
    if len(points) == 1:
        folder = output_folder(output, config)
        check_output(points[0].config, points[0].jobs, folder)
        outcome = _compare(points[0], folder, workers, "training", as_json)
        if outcome.results:
            _print_comparison(outcome.results, folder, as_json)
        failed = bool(outcome.failures)
    else:
        folder = output or Path("runs") / f"{config.stem}-sweep"
        for point in points:
            check_output(point.config, point.jobs, folder / point.folder_name)
        failed = _sweep(points, folder, workers, as_json)
    if failed:
        raise typer.Exit(1)


def _compare(
    point: SweepPoint, folder: Path, workers: int | None, title: str, quiet: bool
) -> Comparison:
    """Run one comparison, show how it goes, write its page and tell its failures."""
    from noisewise.display import comparison_display
    from noisewise.experiments.comparison import compare, warm_up
    from noisewise.report.comparison import write_comparison

    config, jobs = point.config, point.jobs
    with comparison_display(jobs, config.training.rounds, quiet=quiet, title=title) as display:
        for done, total in warm_up(config, jobs):
            display.planning(done, total)
        outcome = compare(
            config, jobs, folder, workers=workers or cores(), on_round=display.on_round
        )
    for name, fault in outcome.failures.items():
        place = f" ({point.label})" if point.settings else ""
        say(f"noisewise: {name}{place} failed: {fault}", err=True)
    if outcome.results:
        write_comparison(outcome.results, folder)
    return outcome


def _print_comparison(results: Sequence[RunResult], folder: Path, as_json: bool) -> None:
    from noisewise.report.explain import explain
    from noisewise.report.tables import as_text, method_rows

    if as_json:
        say((folder / "summary.json").read_text())
        return
    say(as_text(method_rows(results)))
    say(f"\n{explain(results)}\n\nTables, figures and runs: {folder}")
    say(f"Page: {folder / 'report.html'}")


def _sweep(points: Sequence[SweepPoint], folder: Path, workers: int | None, as_json: bool) -> bool:
    """All comparisons of a sweep, then the page over them; whether any run failed."""
    from noisewise.experiments.sweep import write_sweep
    from noisewise.report.sweep import overview_table
    from noisewise.report.tables import aligned

    outcomes = []
    for number, point in enumerate(points, start=1):
        title = f"{number} of {len(points)}: {point.label}"
        say(title, err=True)
        place = folder / point.folder_name
        outcomes.append(_compare(point, place, workers, f"{number}/{len(points)}", as_json))
    if any(outcome.results for outcome in outcomes):
        sets = write_sweep(points, [outcome.results for outcome in outcomes], folder)
        if as_json:
            say((folder / "sweep.json").read_text())
        else:
            table = overview_table(sets)
            say(aligned(table.headings, table.rows))
            say(f"\nTables, figures and runs: {folder}\nPage: {folder / 'report.html'}")
    return any(outcome.failures for outcome in outcomes)
