"""The command line: parse, call, print. Everything else lives in the package."""

from __future__ import annotations

import json
import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from noisewise import __version__
from noisewise.errors import InvalidValueError, NoisewiseError

# Commands import what they call when they are called: torch alone takes a second, and `--help`
# or a mistyped option should not have to wait for it.

app = typer.Typer(
    name="noisewise",
    help="Federated learning in which every client has its own privacy budget and nobody trusts "
    "the server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(help="A TOML config; see configs/demo.toml.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for results. Default: runs/CONFIG.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes. Default: the number of cores.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a config field: --set training.rounds=10 (repeatable)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _overrides(settings: list[str] | None) -> dict[str, Any]:
    """Read KEY=VALUE pairs; values are TOML, and a word that is not TOML is a string."""
    found: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidValueError("--set", setting, "must be KEY=VALUE")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value
    return found


def _folder(output: Path | None, config: Path) -> Path:
    return output or Path("runs") / config.stem


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
    if version:
        typer.echo(f"noisewise {__version__}")
        raise typer.Exit


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

    wanted = load_config(config, _overrides(settings))
    chosen = wanted.method
    if method is not None:
        chosen = comparison_jobs(wanted, [method], 1)[0].method
    job = Job(chosen, wanted.seed if seed is None else seed)
    folder = _folder(output, config) / job.folder_name
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.toml", dump_config(wanted).encode())
    with run_display(job, wanted.training.rounds, quiet=as_json) as on_round:
        clock = Stopwatch()
        hands = workers or _cores()
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

    wanted = load_config(config, _overrides(settings))
    names = (
        None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    )
    jobs = comparison_jobs(wanted, names, seeds)
    folder = _folder(output, config)
    with comparison_display(jobs, wanted.training.rounds, quiet=as_json) as display:
        for done, total in warm_up(wanted, jobs):
            display.planning(done, total)
        outcome = compare(
            wanted, jobs, folder, workers=workers or _cores(), on_round=display.on_round
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


@app.command("plan")
def plan_command(
    epsilon: Annotated[float, typer.Option(help="The client's privacy budget.")],
    examples: Annotated[int, typer.Option(help="Its number of training records N.")],
    batch_size: Annotated[int, typer.Option(help="Its expected batch b.")],
    rounds: Annotated[int, typer.Option(help="Rounds for which the budget must last.")],
    delta: Annotated[float, typer.Option(help="delta of the budget.")] = 1e-4,
    local_epochs: Annotated[int, typer.Option(help="Passes over the data in a round.")] = 1,
    clip: Annotated[float, typer.Option(help="Clipping norm c.")] = 3.0,
    learning_rate: Annotated[float, typer.Option(help="Local rate, for sigma^2 only.")] = 0.01,
    parameters: Annotated[int, typer.Option(help="Model size p, for sigma^2 only.")] = 28938,
    accountant: Annotated[str, typer.Option(help="One of pld, rdp, moments.")] = "pld",
    as_json: AsJson = False,
) -> None:
    """Say how much noise a client needs for its budget.

    Example:
      noisewise plan --epsilon 0.5 --delta 1e-4 --examples 2400 --batch-size 32 --rounds 200
    """
    from noisewise.data.specs import ClientSpec
    from noisewise.federation.rounds import plan_noise
    from noisewise.privacy.plan import make_plan
    from noisewise.privacy.spending import epsilon_spent

    spec = ClientSpec("this-site", examples, batch_size, epsilon, delta, local_epochs)
    plan = make_plan(spec, rounds=rounds, clip_norm=clip, accountant=accountant)
    answer = {
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "steps_per_round": plan.steps_per_round,
        "epsilon": epsilon_spent(plan, rounds),
        "delta": delta,
        "rounds": rounds,
        "accountant": accountant,
        "update_noise_variance": plan_noise(plan, parameters, learning_rate),
    }
    if as_json:
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"noise multiplier z   {plan.noise_multiplier:.6g}")
    typer.echo(f"sample rate q        {plan.sample_rate:.6g}")
    typer.echo(f"steps per round      {plan.steps_per_round}")
    typer.echo(
        f"epsilon reached      {answer['epsilon']:.6g} of {epsilon:g} at delta {delta:g} "
        f"after {rounds} rounds ({accountant})"
    )
    typer.echo(
        f"sigma^2 of an update {answer['update_noise_variance']:.6g} "
        f"(p = {parameters}, learning rate {learning_rate:g}, clip {clip:g})"
    )


@app.command("estimate")
def estimate_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="One safetensors, npz or npy file with an array `updates`, p x n; or one file for "
            "each client with its update of p numbers, or a folder of them."
        ),
    ],
    estimator: Annotated[
        str, typer.Option(help="pcp, factor, norm, or your own as package.module:name.")
    ] = "pcp",
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for figures: spectra; with a known truth, precision too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate how noisy each client's update is, and the weights that follow.

    Files are read by rows, so that a matrix may be larger than the memory.

    Examples:
      noisewise estimate updates.npz --estimator pcp --json
      noisewise estimate hospital-*.safetensors --estimator factor
    """
    from noisewise.aggregation.readers import open_updates
    from noisewise.aggregation.weights import inverse_variance_weights, without_empty
    from noisewise.federation.results import to_json
    from noisewise.noise.blocks import estimate_noise
    from noisewise.noise.gram import column_energy
    from noisewise.noise.table import make_estimator

    source = open_updates(files[0] if len(files) == 1 else files)
    noise = estimate_noise(make_estimator(estimator), source)
    variance = noise.variance
    if not (variance > 0).all():
        variance = without_empty(variance, column_energy(source)[0] == 0)
    weights = inverse_variance_weights(variance)
    if figures is not None:
        _draw_estimates(files, figures)
    if as_json:
        answer = {
            "variance": noise.variance,
            "weights": weights,
            "converged": bool(noise.converged),
            "estimator": noise.method,
            "clients": list(source.names),
        }
        typer.echo(to_json(answer))
        return
    width = max(6, *(len(name) for name in source.names))
    typer.echo(f"{'client':>{width}}  {'noise variance':>14}  {'weight':>8}")
    for name, variance, weight in zip(source.names, noise.variance, weights, strict=True):
        typer.echo(f"{name:>{width}}  {variance:>14.6g}  {weight:>8.4f}")
    if not noise.converged:
        typer.echo(f"not converged: {dict(noise.details)}", err=True)


def _draw_estimates(files: list[Path], folder: Path) -> None:
    """All figures that a file of updates allows."""
    from noisewise.aggregation.readers import read_updates
    from noisewise.aggregation.weights import inverse_variance_weights
    from noisewise.experiments.estimation import read_truth, study_estimates
    from noisewise.report import estimates
    from noisewise.report.figures import save_figure

    if len(files) != 1:
        raise InvalidValueError("--figures", len(files), "needs one file with all updates")
    study = study_estimates(read_updates(files[0]), read_truth(files[0]))
    save_figure(estimates.spectrum_figure(study.singular_values), folder, "spectrum")
    if study.truth is not None:
        save_figure(estimates.truth_figure(study.variance, study.truth), folder, "truth")
        weights = {name: inverse_variance_weights(v) for name, v in study.variance.items()}
        oracle = inverse_variance_weights(study.truth)
        save_figure(estimates.weights_against_oracle_figure(weights, oracle), folder, "weights")
        save_figure(estimates.sample_figure(study.sample_sizes, study.excess), folder, "sample")
    typer.echo(f"figures in {folder}", err=True)


@app.command("updates")
def updates_command(
    config: Config,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .safetensors file.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    workers: Workers = None,
    settings: Set = None,
) -> None:
    """Train one round and store what the server receives, with the true noise of each update.

    Examples:
      noisewise updates configs/mnist.toml --output updates.safetensors
      noisewise estimate updates.safetensors --figures figures
    """
    from noisewise.experiments.config import load_config
    from noisewise.experiments.estimation import first_round_updates, save_updates
    from noisewise.experiments.runner import Job

    if output.suffix != ".safetensors":
        raise InvalidValueError("--output", str(output), "must end in .safetensors")
    wanted = load_config(config, _overrides(settings))
    job = Job(wanted.method, wanted.seed if seed is None else seed)
    updates, truth = first_round_updates(wanted, job, workers=workers or _cores())
    save_updates(output, updates, truth)
    typer.echo(f"{updates.shape[0]} x {updates.shape[1]} updates and their true noise: {output}")


@app.command("methods")
def methods_command(as_json: AsJson = False) -> None:
    """List the methods and what each server has to be told about the clients."""
    from noisewise.aggregation.methods import METHODS, make_method

    methods = [make_method(name) for name in METHODS]
    needs = {m.name: sorted(need.value for need in m.aggregator.needs) for m in methods}
    if as_json:
        rows = [
            {"method": m.name, "needs": needs[m.name], "private": m.private, "summary": m.summary}
            for m in methods
        ]
        typer.echo(json.dumps(rows))
        return
    typer.echo(f"{'method':<12} {'the server is told':<20} what it does")
    for method in methods:
        told = ", ".join(needs[method.name]) or "nothing"
        typer.echo(f"{method.name:<12} {told:<20} {method.summary}")


@app.command("population")
def population_command(
    config: Config,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure.")
    ] = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Show a config's clients: budgets, batches, the noise that they need and the oracle's weight.

    Example:
      noisewise population configs/demo.toml --output runs/demo
    """
    from noisewise.experiments.config import load_config
    from noisewise.experiments.setup import describe_population
    from noisewise.federation.results import to_json
    from noisewise.report.population import population_figure, population_text, save_figure

    rows = describe_population(load_config(config, _overrides(settings)))
    if as_json:
        typer.echo(to_json([vars(row) for row in rows]))
    else:
        typer.echo(population_text(rows))
    if output is not None:
        png, _ = save_figure(population_figure(rows), output, "population")
        typer.echo(f"\nfigure: {png}", err=as_json)


data_app = typer.Typer(help="Datasets: what there is, get it, check it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DatasetName = Annotated[str, typer.Argument(help="A name from `noisewise data list`.")]


@data_app.command("list")
def data_list_command(as_json: AsJson = False) -> None:
    """List the datasets and whether they are here."""
    from noisewise.data import list_datasets

    rows = list_datasets()
    if as_json:
        fields = ("name", "n_train", "n_test", "n_classes", "state")
        typer.echo(json.dumps([{name: getattr(row, name) for name in fields} for row in rows]))
        return
    typer.echo(f"{'name':<14} {'train':>7} {'test':>7} {'shape':<12} {'state':<9} sources")
    for row in rows:
        shape = "x".join(map(str, row.shape))
        sources = ", ".join(row.sources) or "scikit-learn"
        typer.echo(
            f"{row.name:<14} {row.n_train:>7} {row.n_test:>7} {shape:<12} {row.state:<9} {sources}"
        )


@data_app.command("get")
def data_get_command(
    name: DatasetName,
    folder: Annotated[Path | None, typer.Option(help="Where files were placed by hand.")] = None,
) -> None:
    """Fetch a dataset into the cache, from the first source that has it, and verify it.

    Example:
      noisewise data get mnist
    """
    from noisewise.data import get_dataset
    from noisewise.data.progress import progress_bar

    with progress_bar() as progress:
        status = get_dataset(name, folder, progress)
    typer.echo(f"{status.name}: {status.state}" + (f" in {status.folder}" if status.folder else ""))


@data_app.command("verify")
def data_verify_command(name: DatasetName) -> None:
    """Compare a cached dataset with its SHA-256, byte by byte; exit code 1 if it is not whole."""
    from noisewise.data import verify_dataset

    problems = verify_dataset(name)
    for problem in problems:
        typer.echo(f"noisewise: {name}: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{name}: ok")


def main() -> None:
    """Entry point: errors that the user can mend are one line and exit code 2, no traceback."""
    try:
        app()
    except InvalidValueError as error:
        typer.echo(f"noisewise: {error}", err=True)
        sys.exit(2)
    except NoisewiseError as error:
        typer.echo(f"noisewise: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("noisewise: interrupted; the same command goes on from here", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
