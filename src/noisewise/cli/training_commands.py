"""`noisewise run`, `compare`, `attacks` and `report`: train, and show the results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import (
    TRAIN,
    AsJson,
    Config,
    Output,
    Set,
    SetSeveral,
    Workers,
    app,
    output_folder,
    overrides,
    say,
    swept_values,
    words,
)
from noisewise.worker_processes import available_cores

if TYPE_CHECKING:
    from noisewise.experiments.attack_study import AttackRun


@app.command("run", rich_help_panel=TRAIN)
def run_command(
    config: Config,
    method: Annotated[
        str | None, typer.Option(help="A name from `noisewise methods`, or your own.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed, instead of the config's.")
    ] = None,
    output: Output = None,
    workers: Workers = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time goes; writes timing.json.")
    ] = False,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train once with one method. Run the same command again to resume an interrupted run.

    Examples:
      noisewise run configs/demo.toml

      noisewise run configs/demo.toml --method WeiAvg --seed 3 --set training.rounds=10

      noisewise run configs/demo.toml --profile --set training.executor=processes
    """
    from noisewise.cli.display import TrainingDisplay
    from noisewise.experiments.config import load_config
    from noisewise.experiments.config_task import config_task
    from noisewise.experiments.prepare import find_method
    from noisewise.experiments.runner import Job, run
    from noisewise.federation.missing_updates import no_updates_text
    from noisewise.federation.stopwatch import Stopwatch
    from noisewise.report.tables import as_text, method_rows
    from noisewise.report.timing_report import report_timing
    from noisewise.storage import to_json

    checked_config = load_config(config, overrides(settings))
    job = Job(find_method(checked_config, method), checked_config.seed if seed is None else seed)
    folder, clock = output_folder(output, config) / job.folder_name, Stopwatch()
    with TrainingDisplay(quiet=as_json) as display:
        metric = config_task(checked_config).main.info
        display.start("", 1, checked_config.training.rounds, metric)
        result = run(
            checked_config,
            job.method,
            job.seed,
            folder=folder,
            workers=workers or available_cores(),
            on_round=lambda record: display.on_round(job.label, job.seed, record),
            clock=clock,
        )
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


@app.command("compare", rich_help_panel=TRAIN)
def compare_command(
    config: Config,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, instead of the config's; your own as package.module:name."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs of each method, instead of the config's."),
    ] = None,
    output: Output = None,
    workers: Workers = None,
    settings: SetSeveral = None,
    as_json: AsJson = False,
) -> None:
    """Train with several methods and seeds, and compare them on a page with figures.

    Methods under one seed share the split, the initial model and the sampling. Run the same command
    again to resume an interrupted comparison. A field with several values is swept: there is one
    comparison for each value, each in its own folder, and one page over all.

    Examples:
      noisewise compare configs/demo.toml

      noisewise compare configs/demo.toml --methods RobustHDP,WeiAvg --seeds 5

      noisewise compare configs/demo.toml --set training.clip_norm=0.5,1,2
    """
    from noisewise.cli.display import TrainingDisplay
    from noisewise.experiments.comparison import compare
    from noisewise.report.explain import explain
    from noisewise.report.sweep_report import overview_table
    from noisewise.report.tables import aligned, as_text, method_rows

    values = swept_values(settings)
    swept = {field: several for field, several in values.items() if len(several) > 1}
    folder = output or Path("runs") / (f"{config.stem}-sweep" if swept else config.stem)
    with TrainingDisplay(quiet=as_json) as display:
        comparison = compare(
            config,
            words("--methods", methods),
            seeds,
            set={field: several[0] for field, several in values.items() if field not in swept},
            sweep=swept,
            folder=folder,
            workers=workers or available_cores(),
            progress=display,
        )
    for name, reason in comparison.failures.items():
        say(f"noisewise: {name} failed: {reason}", err=True)
    if comparison.results:
        page, *_ = comparison.write_report()
        if as_json:
            say((folder / ("sweep.json" if swept else "summary.json")).read_text())
        else:
            if swept:
                table = overview_table(comparison.run_sets)
                say(aligned(table.headings, table.rows))
            else:
                say(as_text(method_rows(comparison.results)))
                say(f"\n{explain(comparison.results)}")
            say(f"\nTables, figures and runs: {folder}\nPage: {page}")
    if comparison.failures:
        raise typer.Exit(1)


@app.command("attacks", rich_help_panel=TRAIN)
def attacks_command(
    config: Config,
    attackers: Annotated[
        str, typer.Option(help="Ids of the attackers, comma-separated; two for sybils.")
    ] = "client-00,client-01",
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated, instead of the config's.")
    ] = None,
    attacks: Annotated[str | None, typer.Option(help="Comma-separated; default: all.")] = None,
    together: Annotated[
        bool, typer.Option("--together", help="All attackers attack at once, in every attack.")
    ] = False,
    output: Output = None,
    workers: Workers = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train every method under every attack; show the attackers' weight and the accuracy left.

    Noise-aware methods run twice, with and without the guard of the config's policy. Run the same
    command again to resume an interrupted study.

    Example:
      noisewise attacks configs/attacks.toml --methods NoiseWise,RobustHDP --attacks zero,sign_flip
    """
    from noisewise.experiments.attack_study import study_attacks
    from noisewise.report.attack_report import attack_text
    from noisewise.storage import to_json

    def announce(number: int, total: int, run: AttackRun) -> None:
        say(f"{number} of {total}: {run.label}, {run.attack}", err=True)

    folder = output_folder(output, config)
    study = study_attacks(
        config,
        words("--attackers", attackers) or [],
        methods=words("--methods", methods),
        attacks=words("--attacks", attacks),
        together=together,
        set=overrides(settings),
        folder=folder,
        workers=workers or available_cores(),
        on_run=announce,
    )
    figure, *_ = study.write_report(folder)
    if as_json:
        say(to_json([asdict(row) for row in study.rows]))
    else:
        say(f"{attack_text(study.rows)}\n\nfigure: {figure}")


@app.command("report", rich_help_panel=TRAIN)
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_FOLDER...",
            help="Folders of runs, comparisons or sweeps; unfinished runs are shown too.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the page. Default: the folder itself; runs/report for several.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about runs on disk, and its figures as PNG, SVG and PDF.

    The page opens without a network. It shows accuracy, noise and weights next to the oracle's,
    budgets spent, disclosures, fairness and the config.

    Examples:
      noisewise report runs/demo

      noisewise report runs/monday runs/tuesday --output runs/both
    """
    from noisewise.report.comparison_report import write_report
    from noisewise.report.run_sets import find_runs
    from noisewise.storage import to_json

    runs_on_disk = find_runs(folders)
    for note in runs_on_disk.notes:
        say(f"noisewise: {note}", err=True)
    target = folders[0] if len(folders) == 1 else Path("runs") / "report"
    page, *files = write_report(
        runs_on_disk.sets, output or target, title=title, notes=runs_on_disk.notes
    )
    runs = [run for run_set in runs_on_disk.sets for run in run_set.results]
    counts = {
        status: sum(run.status == status for run in runs)
        for status in ("unfinished", "diverged", "no_updates")
    }
    if as_json:
        names = [str(file) for file in files]
        say(to_json({"page": str(page), "files": names, "runs": len(runs), **counts}))
        return
    status_words = {"no_updates": "without any update"}
    remarks = [f"{n} {status_words.get(status, status)}" for status, n in counts.items() if n]
    count = f"{len(runs)} run" + "s" * (len(runs) != 1)
    say(count + (f" ({', '.join(remarks)})" if remarks else "") + f": {page}")
