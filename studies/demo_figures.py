"""Write the demo's results and picture, which the README and docs/demo.md show.

    noisewise compare configs/digits_head.toml --output runs/demo
    python studies/demo_figures.py runs/demo

The command writes studies/results/demo.json, draws demo.png and demo-narrow.png in docs/images, and
copies two figures of the report there.
tests/project/test_demo_figures.py compares the tables of the pages with this file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from noisewise.federation.results import RunResult, load_run
from noisewise.palette import MUTED
from noisewise.report.chart import method_styles, save_figure, style_axes
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "studies" / "results" / "demo.json", ROOT / "docs" / "images"
COMMAND = "noisewise compare configs/digits_head.toml --output runs/demo"
SHOWN = ["NoiseWise", "RobustHDP", "BudgetAvg", "DPFedAvg", "WeiAvg", "MinEpsilon", "Alone"]
DISCLOSED = {"epsilon": "epsilon", "n_examples": "number of records"}


def read_runs(folder: Path) -> list[RunResult]:
    """Return the finished runs of a comparison's folder."""
    runs = [load_run(path) for path in sorted((folder / "runs").iterdir())]
    unfinished = [f"{run.method}, seed {run.seed}" for run in runs if run.status != "finished"]
    if unfinished:
        raise SystemExit(f"not finished: {'; '.join(unfinished)}")
    return runs


def collect(runs: list[RunResult]) -> dict[str, Any]:
    """Return what the pages show: figures of each method by seed, and the clients of seed 0."""
    methods: dict[str, Any] = {}
    for run in sorted(runs, key=lambda run: (run.method, run.seed)):
        figures = methods.setdefault(run.method, {"needs": list(run.needs), "accuracy": {}})
        figures["accuracy"][str(run.seed)] = run.accuracy
        for name in ("noise_ratio", "signal_share"):
            value = getattr(run, name)
            if math.isfinite(value):
                figures.setdefault(name, {})[str(run.seed)] = value
    first = next(run for run in runs if run.method == "NoiseWise" and run.seed == 0)
    clients = [
        {
            "epsilon": facts["epsilon"],
            "records": facts["n_examples"],
            "batch": facts["batch_size"],
            "noise": facts["steps_per_round"]
            * (facts["noise_multiplier"] / facts["batch_size"]) ** 2,
        }
        for facts in first.clients.values()
    ]
    date = datetime.now(tz=UTC).date().isoformat()
    return {"command": COMMAND, "date": date, "clients_of_seed_0": clients, "methods": methods}


def mean_and_error(values: dict[str, float]) -> tuple[float, float]:
    """Return mean and standard error over the seeds, in percent."""
    percent = [100 * value for value in values.values()]
    return statistics.mean(percent), statistics.stdev(percent) / math.sqrt(len(percent))


def draw_noise(axes: Axes, demo: dict[str, Any]) -> None:
    """Draw the noise of each client's update."""
    noise = sorted(client["noise"] for client in demo["clients_of_seed_0"])
    axes.bar(range(1, len(noise) + 1), [value / noise[0] for value in noise], color=MUTED)
    axes.set_yscale("log")
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_xticks([])
    axes.set_xlabel(f"{len(noise)} hospitals, each with its own epsilon")
    axes.set_ylabel("noise energy,\nsmallest = 1")
    axes.set_title("Noise in a hospital's update", loc="left", fontsize=10.5)
    style_axes(axes, grid="y")


def draw_accuracy(axes: Axes, demo: dict[str, Any]) -> None:
    """Draw the accuracy of each method, and what its clients disclose."""
    styles = method_styles(SHOWN)
    for row, name in enumerate(reversed(SHOWN)):
        figures = demo["methods"][name]
        mean, error = mean_and_error(figures["accuracy"])
        axes.barh(row, mean, xerr=error, color=styles[name].colour, height=0.62)
        disclosed = ", ".join(DISCLOSED[need] for need in figures["needs"]) or "nothing"
        axes.text(mean + error + 1.5, row, f"{mean:.1f} %", va="center", fontsize=8.5)
        axes.text(120, row, disclosed, va="center", fontsize=8.5)
    axes.text(120, len(SHOWN) - 0.35, "clients disclose", fontsize=8.5, weight="bold")
    axes.set_yticks(range(len(SHOWN)), list(reversed(SHOWN)))
    axes.set_xlim(0, 190)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("accuracy on held-out records [%]")
    axes.set_title("Accuracy at the same budgets", loc="left", fontsize=10.5)
    style_axes(axes, grid="x")


def draw(demo: dict[str, Any], stacked: bool) -> Figure:
    """Draw noise and accuracy side by side, or one above the other for a narrow page."""
    size = (4.8, 5.2) if stacked else (9.6, 3.0)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    if stacked:
        first, second = figure.subplots(2, 1, height_ratios=(1, 1.35))
    else:
        first, second = figure.subplots(1, 2, width_ratios=(1, 1.15))
    draw_noise(first, demo)
    draw_accuracy(second, demo)
    return figure


def main() -> None:
    """Write the results and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/demo"))
    folder = parser.parse_args().folder
    demo = collect(read_runs(folder))
    write_atomic(RESULTS, (json.dumps(demo, indent=1) + "\n").encode())
    for name, stacked in (("demo", False), ("demo-narrow", True)):
        save_figure(draw(demo, stacked), IMAGES, name, ["png"])
    for name in ("accuracy", "weights"):
        picture = (folder / "figures" / f"{name}.png").read_bytes()
        write_atomic(IMAGES / f"demo-{name}.png", picture)
    print(f"written: {RESULTS.relative_to(ROOT)} and the pictures demo*.png of docs/images")


if __name__ == "__main__":
    main()
