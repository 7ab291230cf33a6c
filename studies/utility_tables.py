"""Turn studies/results/utility.jsonl into the tables and figures of docs/utility.md.

    python studies/utility_tables.py

The command replaces everything between the two marks in the page. Cells without results stay
empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from utility import (
    DISTS,
    FEDERATIONS,
    IMAGES,
    METHODS,
    ORDERS,
    RATES,
    REFERENCES,
    RESULTS,
    STEPS_DIST,
    STRENGTHS,
    result_file,
)

from noisewise.paper.published import published_table
from noisewise.report.chart import save_figure
from noisewise.report.study_figures import DotSeries, Step, population_dots, waterfall
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
PAGE, IMAGES_FOLDER = ROOT / "docs" / "utility.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TITLES = {
    "mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10",
    "encoder": "CIFAR-10, public encoder",
}  # fmt: skip
PUBLISHED = {
    "mnist": "mnist_accuracy", "fashion": "fmnist_accuracy", "cifar10": "cifar10_accuracy",
    "encoder": "cifar10_accuracy",
}  # fmt: skip
Seeds = Mapping[int, dict[str, Any]]


@lru_cache(maxsize=1)
def _cells() -> Mapping[tuple[str, str, str, str], Seeds]:
    cells: dict[tuple[str, str, str, str], dict[int, dict[str, Any]]] = {}
    for result in result_file(RESULTS).read():
        key = result["part"], result["population"], result["method"], result["rate"]
        cells.setdefault(key, {})[result["seed"]] = result
    return cells


def accuracies(part: str, population: str, method: str, rate: str = "auto") -> dict[int, float]:
    """The accuracy in percent by seed."""
    cell = _cells().get((part, population, method, rate), {})
    return {seed: 100 * result["accuracy"] for seed, result in sorted(cell.items())}


def text(values: Sequence[float]) -> str:
    """Mean and standard error over seeds; empty without values."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.1f}"


def cell(part: str, population: str, method: str, rate: str = "auto") -> str:
    """One cell of a table."""
    return text(list(accuracies(part, population, method, rate).values()))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def image_tables() -> list[str]:
    """One table for each dataset: published, pixels, features."""
    lines: list[str] = []
    for part in IMAGES:
        published = published_table(PUBLISHED[part])["RobustHDP"]
        rows = [["Robust-HDP, published", *(f"{published[dist][0]:.1f}" for dist in DISTS)]]
        if part != "encoder":
            for method in ("RobustHDP", "NoiseWise"):
                cells = [cell(f"{part}_pixels", dist, method) for dist in DISTS]
                rows.append([f"{method}, pixels", *cells])
        features = "encoder" if part == "encoder" else "scattering"
        for method in reversed(IMAGES[part][1]):
            cells = [cell(part, dist, method) for dist in DISTS]
            label = (
                f"**{method}, {features}**" if method == "NoiseWise" else f"{method}, {features}"
            )
            rows.append([label, *cells])
        lines += [f"### {TITLES[part]}", "", f"![Accuracy of {TITLES[part]} in each population, "
                  f"the values of the table below](images/utility-{part}.png)", ""]  # fmt: skip
        lines += table(["accuracy [%]", *DISTS], rows)
    return lines


def best_of_grid(part: str, dist: str, method: str = "NoiseWise") -> tuple[str, dict[int, float]]:
    """The rate of the grid with the highest mean accuracy, and its accuracies by seed."""
    tried = {f"{rate:g}": accuracies(part, dist, method, f"{rate:g}") for rate in RATES}
    known = {rate: values for rate, values in tried.items() if values}
    if len(known) < len(RATES):
        return "", {}
    best = max(known, key=lambda rate: float(np.mean(list(known[rate].values()))))
    return best, known[best]


def default_differences() -> dict[tuple[str, str], float]:
    """Accuracy of the automatic rate minus that of the best rate of the grid, in points."""
    differences = {}
    for part in IMAGES:
        for dist in DISTS:
            _, best = best_of_grid(part, dist)
            auto = accuracies(part, dist, "NoiseWise")
            seeds = sorted(set(best) & set(auto))
            if seeds:
                differences[part, dist] = float(np.mean([auto[s] - best[s] for s in seeds]))
    return differences


def default_table() -> list[str]:
    """The automatic rate against the best of six rates."""
    differences = default_differences()
    rows = []
    for part in IMAGES:
        known = [differences[part, dist] for dist in DISTS if (part, dist) in differences]
        cells = [
            f"{differences[part, dist]:+.2f}" if (part, dist) in differences else ""
            for dist in DISTS
        ]
        rows.append([TITLES[part], *cells, f"{np.mean(known):+.2f}" if known else ""])
    lines = table(["auto minus best of six [points]", *DISTS, "mean"], rows)
    if differences:
        worst, mean = min(differences.values()), np.mean(list(differences.values()))
        lines += [
            f"Over {len(differences)} cells, the mean difference is {mean:+.2f} points and the "
            f"worst is {worst:+.2f} points.",
            "",
        ]
    return lines


def federation_table() -> list[str]:
    """All methods on the real federations, and how far NoiseWise is below the best."""
    lines: list[str] = []
    for part, dist in FEDERATIONS.items():
        populations = [f"{dist}{order}" for order in ORDERS]
        rows = [
            [method, *(cell(part, population, method) for population in populations)]
            for method in METHODS + REFERENCES
        ]
        if any(any(row[1:]) for row in rows):
            lines += [f"### {part}", ""]
            lines += table([f"accuracy [%], {dist}", "random order", "small sites stricter",
                            "large sites stricter"], rows)  # fmt: skip
    return lines


def joining_table() -> list[str]:
    """How many clients of each real federation gain from the common model."""
    rows = []
    for part, dist in FEDERATIONS.items():
        for order, label in zip(
            ORDERS, ("random", "small stricter", "large stricter"), strict=True
        ):
            alone = _cells().get((part, dist + order, "Alone", "auto"), {})
            common = _cells().get((part, dist + order, "NoiseWise", "auto"), {})
            seeds = sorted(set(alone) & set(common))
            if not seeds:
                continue
            gains: dict[str, list[float]] = {}
            for seed in seeds:
                own = dict(alone[seed]["clients"])
                for client, value in dict(common[seed]["clients"]).items():
                    gain = 100 * (value - own[client])
                    gains.setdefault(client, []).append(gain)
            means = [float(np.mean(values)) for values in gains.values()]
            winners = sum(mean > 0 for mean in means)
            rows.append(
                [part, label, str(len(means)), str(winners), f"{np.mean(means):+.1f}",
                 f"{min(means):+.1f}", f"{max(means):+.1f}"]
            )  # fmt: skip
    headings = ["federation", "epsilons", "clients", "clients that gain", "mean gain [points]",
                "smallest", "largest"]  # fmt: skip
    return table(headings, rows) if rows else []


FEDERATION_SIZES = {"fars": (51, 1176), "heart": (4, 84), "vietnam": (194, 36), "spam": (5, 770)}


def estimate_table() -> list[str]:
    """How much of the best signal-to-noise ratio the weights reach with few parameters."""
    rows = []
    for part, dist in FEDERATIONS.items():
        clients, parameters = FEDERATION_SIZES[part]
        shares = {
            method: [
                run["signal_share"]
                for order in ORDERS
                for run in _cells().get((part, dist + order, method, "auto"), {}).values()
            ]
            for method in ("NoiseWise", "RobustHDP", "DPFedAvg")
        }
        if all(shares.values()):
            means = [f"{np.mean(values):.2f}" for values in shares.values()]
            rows.append([part, str(clients), f"{parameters:,}", *means])
    headings = ["signal / best in the last round", "clients", "parameters",
                "NoiseWise", "RobustHDP", "DPFedAvg"]  # fmt: skip
    return table(headings, rows) if rows else []


def choice_tables() -> list[str]:
    """The strength of the rule, and one choice of the head changed at a time."""
    names = [f"{strength:g}" for strength in STRENGTHS]
    rows = [
        [dist, *(cell("mnist_rule", dist, "NoiseWise", f"auto {name}") for name in names)]
        for dist in ("Dist1", "Dist2", "Dist3")
    ]
    lines = table(["MNIST: accuracy [%] at k =", *names], rows)
    labels = {
        "mnist": "as in the config",
        "mnist_constant": "a constant of 1, which is a bias",
        "mnist_clip": "clipping norm 1",
        "mnist_rounds": "120 rounds",
    }
    rows = []
    for part, label in labels.items():
        first = [accuracies(part, dist, "NoiseWise").get(0) for dist in ("Dist1", "Dist6")]
        rows.append([label, *("" if value is None else f"{value:.1f}" for value in first)])
    return lines + table(["MNIST, seed 0: accuracy [%]", "Dist1", "Dist6"], rows)


def steps_of(part: str) -> list[Step]:
    """What each step is worth on one population; empty if a result is missing."""
    runs = [
        (
            "DPFedAvg on pixels, moments",
            best_of_grid(f"{part}_moments", STEPS_DIST, "DPFedAvg")[1],
        ),
        ("accountant: pld", best_of_grid(f"{part}_pixels", STEPS_DIST, "DPFedAvg")[1]),
        ("weights: NoiseWise", best_of_grid(f"{part}_pixels", STEPS_DIST, "NoiseWise")[1]),
        ("features: scattering", best_of_grid(part, STEPS_DIST)[1]),
    ]
    if not all(values for _, values in runs):
        return []
    seeds = sorted(runs[-1][1])
    auto = accuracies(part, STEPS_DIST, "NoiseWise")
    steps = [Step(label, float(np.mean(list(values.values())))) for label, values in runs]
    steps.append(Step("defaults: no rate chosen", float(np.mean([auto[s] for s in seeds]))))
    if part == "cifar10" and (encoder := accuracies("encoder", STEPS_DIST, "NoiseWise")):
        values = [encoder[s] for s in seeds if s in encoder]
        steps.append(Step("public encoder", float(np.mean(values))))
    return steps


def step_figures() -> list[str]:
    """The waterfall of each dataset, as an image and its values."""
    lines: list[str] = []
    for part in ("mnist", "fashion", "cifar10"):
        if steps := steps_of(part):
            title = f"{TITLES[part]}, {STEPS_DIST}: what each step is worth"
            chart = waterfall(steps, name=f"utility-steps-{part}", title=title)
            save_figure(chart.figure, IMAGES_FOLDER, chart.name, ("png",))
            lines += [f"![{title}](images/{chart.name}.png)", ""]
            lines += table(chart.values.headings, chart.values.rows)
    return lines


def draw_populations() -> None:
    """One figure for each dataset."""
    for part, (_, methods) in IMAGES.items():
        published = {d: v[0] for d, v in published_table(PUBLISHED[part])["RobustHDP"].items()}
        series = [
            DotSeries("published Robust-HDP", {d: published[d] for d in DISTS}, "RobustHDP", True)
        ]
        for method in methods[:3]:
            values = {d: list(accuracies(part, d, method).values()) for d in DISTS}
            known = {d: v for d, v in values.items() if v}
            if known:
                series.append(DotSeries(method, known))
        if len(series) > 1:
            chart = population_dots(series, name=f"utility-{part}", title=TITLES[part])
            save_figure(chart.figure, IMAGES_FOLDER, chart.name, ("png",))


def page() -> str:
    """Everything between the marks."""
    dates = sorted({result["date"] for result in result_file(RESULTS).read()})
    machine = sorted({result["machine"] for result in result_file(RESULTS).read()})
    lines = [
        f"Results of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {', '.join(machine)}. "
        "Cells are means over seeds with standard errors; one number means one seed.",
        "",
        "## Accuracy at the same budgets",
        "",
        *image_tables(),
        "## Without tuning: the automatic rate against the best of six rates",
        "",
        *default_table(),
        "## Choices of the rule and of the head",
        "",
        *choice_tables(),
        "## What each step is worth",
        "",
        *step_figures(),
        "## Real federations",
        "",
        "Clients are states (fars), hospitals (heart), communes (vietnam) and collections of "
        "e-mails (spam); see [Data](data.md). FedAvg has no privacy, and Oracle knows the true "
        "noise: both are references. NoiseWise and RobustHDP are told nothing about the clients.",
        "",
        *federation_table(),
        "### Few parameters: rough estimates of the noise",
        "",
        "The server estimates the noise of an update from its p parameters, with an error of about "
        "sqrt(2 / p). The table shows the signal-to-noise ratio of the aggregate divided by the "
        "best one, as a mean over seeds and orders. NoiseWise is below RobustHDP on purpose: where "
        "the clients' data differ, it gives up some of this ratio to reduce the bias towards the "
        "clients with the least noise. On spam this is worth several points of accuracy.",
        "",
        *estimate_table(),
        "## Does joining pay?",
        "",
        "`Alone` trains one model for each client, at the client's own epsilon. Gains are those of "
        "NoiseWise's common model over it, on the client's own held-out records, as a mean over "
        "seeds.",
        "",
        *joining_table(),
        "- fars: most states gain. States with few records gain most (Alaska and Vermont more than "
        "20 points); Alabama and Virginia lose 13 points, because a model of their own fits them "
        "better than one model for all states.",
        "- heart: joining does not pay. Four hospitals are too few, and each has enough records "
        "for 84 parameters.",
        "- vietnam: two thirds of the communes gain, but little on average.",
        "- spam: each collection has e-mails of one class only. A model trained alone predicts "
        "this class for every e-mail, and its accuracy on the client's own records says nothing.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Draw the figures and write the page."""
    draw_populations()
    content = PAGE.read_text()
    before, after = content.partition(BEGIN)[0], content.partition(END)[2]
    write_atomic(PAGE, f"{before}{BEGIN}\n\n{page().strip()}\n\n{END}{after}".encode())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
