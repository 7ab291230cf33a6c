"""`noisewise estimate` and `noisewise updates`: the noise of what a server receives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import AsJson, Config, Set, Workers, app, cores, overrides, say
from noisewise.errors import InvalidValueError
from noisewise.text import align_columns


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
        say(to_json(answer))
        return
    rows = [
        (name, f"{variance:.6g}", f"{weight:8.4f}")
        for name, variance, weight in zip(source.names, noise.variance, weights, strict=True)
    ]
    table = [("client", "noise variance", "weight"), *rows]
    say("\n".join(align_columns(table, right=range(3))))
    if not noise.converged:
        say(f"not converged: {dict(noise.details)}", err=True)


def _draw_estimates(files: list[Path], folder: Path) -> None:
    """All figures that a file of updates allows."""
    from noisewise.aggregation.readers import read_updates
    from noisewise.aggregation.weights import inverse_variance_weights
    from noisewise.experiments.estimation import read_truth, study_estimates
    from noisewise.report import estimates
    from noisewise.report.chart import save_figure

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
    say(f"figures in {folder}", err=True)


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
    wanted = load_config(config, overrides(settings))
    job = Job(wanted.method, wanted.seed if seed is None else seed)
    updates, truth = first_round_updates(wanted, job, workers=workers or cores())
    save_updates(output, updates, truth)
    say(f"{updates.shape[0]} x {updates.shape[1]} updates and their true noise: {output}")
