"""`noisewise estimate` and `noisewise updates`: the noise of the updates a server receives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import (
    DATA,
    AsJson,
    Config,
    Set,
    Workers,
    app,
    overrides,
    say,
)
from noisewise.errors import InvalidValueError
from noisewise.text import align_columns
from noisewise.worker_processes import available_cores


@app.command("estimate", rich_help_panel=DATA)
def estimate_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="One safetensors, npz or npy file with an array `updates`, p x n; or one file for "
            "each client with its update of p numbers, or a folder of such files."
        ),
    ],
    estimator: Annotated[
        str, typer.Option(help="pcp, factor, norm, or your own as package.module:name.")
    ] = "pcp",
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Folder for figures: spectra, and precision if the file has the true noise."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the noise of each client's update, and the weights that follow from it.

    Files are read in blocks of rows, so a matrix may be larger than the memory.

    Examples:
      noisewise estimate updates.npz --estimator pcp --json
      noisewise estimate hospital-*.safetensors --estimator factor
    """
    from noisewise.aggregation.update_files import open_updates
    from noisewise.aggregation.weights import inverse_variance_weights, without_empty
    from noisewise.noise.blocks import estimate_noise
    from noisewise.noise.gram import column_energy
    from noisewise.noise.registry import make_estimator
    from noisewise.storage import to_json

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
    """Write the figures; those of precision only if the file has the true noise."""
    from noisewise.aggregation.update_files import read_updates
    from noisewise.aggregation.weights import inverse_variance_weights
    from noisewise.experiments.estimation import read_truth, study_estimates
    from noisewise.report import estimate_figures as figures
    from noisewise.report.chart import save_figure

    if len(files) != 1:
        raise InvalidValueError(
            "--figures", f"{len(files)} files", "must be used with one file that has all updates"
        )
    study = study_estimates(read_updates(files[0]), read_truth(files[0]))
    save_figure(figures.spectrum_figure(study.singular_values), folder, "spectrum")
    if study.truth is not None:
        save_figure(figures.truth_figure(study.variance, study.truth), folder, "truth")
        weights = {name: inverse_variance_weights(v) for name, v in study.variance.items()}
        oracle = inverse_variance_weights(study.truth)
        save_figure(figures.weights_against_oracle_figure(weights, oracle), folder, "weights")
        save_figure(figures.sample_figure(study.sample_sizes, study.excess), folder, "sample")
    say(f"figures in {folder}", err=True)


@app.command("updates", rich_help_panel=DATA)
def updates_command(
    config: Config,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .safetensors file.")],
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed, instead of the config's.")
    ] = None,
    workers: Workers = None,
    settings: Set = None,
) -> None:
    """Train one round and store the updates, with the true noise of each.

    Examples:
      noisewise updates configs/mnist.toml --output updates.safetensors
      noisewise estimate updates.safetensors --figures figures
    """
    from noisewise.experiments.config import load_config
    from noisewise.experiments.estimation import first_round_updates, save_updates
    from noisewise.experiments.prepare import prepare

    if output.suffix != ".safetensors":
        raise InvalidValueError("--output", str(output), "must end in .safetensors")
    prepared = prepare(load_config(config, overrides(settings)), seed=seed)
    updates, truth = first_round_updates(prepared, workers=workers or available_cores())
    save_updates(output, updates, truth)
    say(f"{updates.shape[0]} x {updates.shape[1]} updates and their true noise: {output}")
