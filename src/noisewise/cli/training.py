"""`noisewise run` and `noisewise compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from noisewise.cli.common import (
    AsJson,
    Config,
    Output,
    Set,
    Workers,
    app,
    cores,
    output_folder,
    overrides,
)


@app.command("run")
def run_command(
    config: Config,
    method: Annotated[str | None, typer.Option(help="Method, instead of the config's.")] = None,
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
    from noisewise.experiments.runner import Job, run
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
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.toml", dump_config(wanted).encode())
    with run_display(job, wanted.training.rounds, quiet=as_json) as on_round:
        clock = Stopwatch()
        hands = workers or cores()
        result = run(wanted, job, folder=folder, workers=hands, on_round=on_round, clock=clock)
    if profile:
        typer.echo(report_timing(clock, folder) + "\n", err=as_json)
    if as_json:
        typer.echo(to_json(result.summary()))
        return
    typer.echo(as_text(method_rows([result])))
    typer.echo(f"\nstatus: {result.status}; results in {folder}")


@app.command("compare")
def compare_command(
    config: Config,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated, instead of the config's.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each method, instead of the config's.")
    ] = None,
    output: Output = None,
    workers: Workers = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train with several methods and seeds and put them side by side, with figures.

    Methods under one seed share the split, the initial model and the sampling. Interrupted
    comparisons go on where they stopped.

    Examples:
      noisewise compare configs/demo.toml

      noisewise compare configs/demo.toml --methods RobustHDP,WeiAvg --seeds 5
    """
    from noisewise.display import comparison_display
    from noisewise.experiments.comparison import compare, comparison_jobs, warm_up
    from noisewise.experiments.config import load_config
    from noisewise.report.comparison import write_comparison
    from noisewise.report.explain import explain
    from noisewise.report.tables import as_text, method_rows

    wanted = load_config(config, overrides(settings))
    names = (
        None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    )
    jobs = comparison_jobs(wanted, names, seeds)
    folder = output_folder(output, config)
    with comparison_display(jobs, wanted.training.rounds, quiet=as_json) as display:
        for done, total in warm_up(wanted, jobs):
            display.planning(done, total)
        outcome = compare(
            wanted, jobs, folder, workers=workers or cores(), on_round=display.on_round
        )
    for name, fault in outcome.failures.items():
        typer.echo(f"noisewise: {name} failed: {fault}", err=True)
    if outcome.results:
        write_comparison(outcome.results, folder)
        if as_json:
            typer.echo((folder / "summary.json").read_text())
        else:
            typer.echo(as_text(method_rows(outcome.results)))
            typer.echo(f"\n{explain(outcome.results)}\n\nTables, figures and runs: {folder}")
    if outcome.failures:
        raise typer.Exit(1)
