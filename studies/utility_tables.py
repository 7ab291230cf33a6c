"""Turn studies/results/utility.jsonl into the tables and figures of docs/utility_results.md.

    python studies/utility_tables.py

The command replaces everything between the two marks in this page and in the other pages of docs/
that are named utility_*.md.
Cells without results stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from utility import (
    DISTS,
    FEDERATIONS,
    IMAGES,
    METHODS,
    ORDERS,
    REFERENCES,
    RESULTS,
    STEPS_DIST,
    STRENGTHS,
    rates_of,
    result_file,
)
from utility_cells import (
    accuracies,
    at_the_edge,
    best_of_grid,
    cell,
    default_differences,
    difference,
    standard_error,
    table,
)
from utility_estimates import few_parameters
from utility_goals import ORDER_TITLES, goals
from utility_joining import draw_joining, joining
from utility_persons import PERSONS_PAGE, persons
from utility_unhelpful import few_rounds, unhelpful

from noisewise.paper.published import published_table
from noisewise.report.chart import save_figure
from noisewise.report.study_figures import DotSeries, Step, population_dots, waterfall
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
PAGE, IMAGES_FOLDER = ROOT / "docs" / "utility_results.md", ROOT / "docs" / "images"
RULE_PAGE = ROOT / "docs" / "utility_rule.md"
FEDERATIONS_PAGE = ROOT / "docs" / "utility_federations.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TITLES = {
    "mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10",
    "encoder": "CIFAR-10, public encoder",
}  # fmt: skip
PUBLISHED = {
    "mnist": "mnist_accuracy", "fashion": "fmnist_accuracy", "cifar10": "cifar10_accuracy",
    "encoder": "cifar10_accuracy",
}  # fmt: skip


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
        image = f"![Accuracy of {TITLES[part]} in each population](images/utility-{part}.png)"
        lines += [f"### {TITLES[part]}", "", image, ""]
        lines += table(["accuracy [%]", *DISTS], rows)
    return lines


def default_table() -> list[str]:
    """The automatic rate against the best rate of the grid."""
    means: list[float] = []
    rows = []
    for part in IMAGES:
        cells = [default_differences(part, dist) for dist in DISTS]
        known = [float(np.mean(values)) for values in cells if values]
        means += known
        mean = f"{np.mean(known):+.2f}" if known else ""
        rows.append([TITLES[part], *map(difference, cells), mean])
    lines = table(["auto minus best of six rates [points]", *DISTS, "mean"], rows)
    rows = []
    for part, dist in FEDERATIONS.items():
        cells = [default_differences(part, dist + order) for order in ORDERS]
        means += [float(np.mean(values)) for values in cells if values]
        rows.append([f"{part}, {dist}", *map(difference, cells)])
    lines += table(["auto minus best of the grid [points]", *ORDER_TITLES], rows)
    if means:
        lines += [
            f"Over {len(means)} cells, the mean difference is {np.mean(means):+.2f} points and the "
            f"worst is {min(means):+.2f} points. The best rate is chosen by the same held-out "
            "records, which favours the grid.",
            "",
            f"Grids: {rates_text('mnist')}; real federations: {rates_text('heart')}. {edges()}",
            "",
        ]
    return lines


def rates_text(part: str) -> str:
    """The rates of a grid."""
    return ", ".join(f"{rate:g}" for rate in rates_of(part))


def edges() -> str:
    """The cells whose best rate is the smallest or the largest of the grid."""
    places = [(part, dist, dist) for part in IMAGES for dist in DISTS]
    places += [
        (part, dist + order, f"{dist}, {title}")
        for part, dist in FEDERATIONS.items()
        for order, title in zip(ORDERS, ORDER_TITLES, strict=True)
    ]
    return _edges([(part, population, "NoiseWise", f"{part} ({title})")
                   for part, population, title in places])  # fmt: skip


def start_edges() -> str:
    """The first steps of the waterfalls whose best rate is at the edge of the grid."""
    cells = []
    for part in ("mnist", "fashion", "cifar10", *FEDERATIONS):
        image = part in IMAGES
        dist, plain = (STEPS_DIST, f"{part}_pixels") if image else (FEDERATIONS[part], part)
        cells += [
            (f"{part}_moments", dist, "DPFedAvg", f"{part}: DPFedAvg, moments"),
            (plain, dist, "DPFedAvg", f"{part}: DPFedAvg, pld"),
            (plain, dist, "NoiseWise", f"{part}: NoiseWise"),
        ]
    return _edges(cells)


def _edges(cells: Sequence[tuple[str, str, str, str]]) -> str:
    found = []
    for part, population, method, label in cells:
        if rate := at_the_edge(part, population, method):
            found.append(f"{label}, {rate}")
    if not found:
        return "No best rate is at the edge of its grid."
    return (
        f"The best rate is at the edge of its grid, so a better one may exist: {'; '.join(found)}."
    )


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
            lines += table([f"accuracy [%], {dist}", *ORDER_TITLES], rows)
    return lines


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


Runs = list[tuple[str, dict[int, float]]]


def step_runs(part: str) -> tuple[Runs, list[int]]:
    """The accuracies by seed after each step on one population, and the seeds that all have."""
    image = part in IMAGES
    dist, plain = (STEPS_DIST, f"{part}_pixels") if image else (FEDERATIONS[part], part)
    start = "DPFedAvg on pixels, moments" if image else "DPFedAvg, moments"
    runs = [
        (start, best_of_grid(f"{part}_moments", dist, "DPFedAvg")[1]),
        ("accountant: pld", best_of_grid(plain, dist, "DPFedAvg")[1]),
        ("weights: NoiseWise", best_of_grid(plain, dist, "NoiseWise")[1]),
    ]
    if image:
        runs.append(("features: scattering", best_of_grid(part, dist)[1]))
    runs.append(("defaults: no rate chosen", accuracies(part, dist, "NoiseWise")))
    if part == "cifar10":
        runs.append(("public encoder", accuracies("encoder", dist, "NoiseWise")))
    return runs, sorted(set.intersection(*(set(values) for _, values in runs)))


def steps_of(part: str) -> list[Step]:
    """What each step is worth on one population; empty if a result is missing."""
    runs, seeds = step_runs(part)
    if not seeds:
        return []
    steps: list[Step] = []
    before: dict[int, float] = {}
    for label, values in runs:
        changes = [values[seed] - before[seed] for seed in seeds if before]
        mean = float(np.mean([values[seed] for seed in seeds]))
        steps.append(Step(label, mean, standard_error(changes)))
        before = values
    return steps


def step_seeds() -> str:
    """The seeds of each waterfall."""
    parts: dict[str, list[str]] = {}
    for part in ("mnist", "fashion", "cifar10", *FEDERATIONS):
        if seeds := step_runs(part)[1]:
            parts.setdefault(", ".join(map(str, seeds)), []).append(TITLES.get(part, part))
    return "; ".join(f"{', '.join(names)}: {seeds}" for seeds, names in parts.items())


def step_figures() -> list[str]:
    """The waterfall of each dataset, as an image and its values."""
    lines: list[str] = []
    for part in ("mnist", "fashion", "cifar10", *FEDERATIONS):
        if steps := steps_of(part):
            dist = STEPS_DIST if part in IMAGES else FEDERATIONS[part]
            title = f"{TITLES.get(part, part)}, {dist}: what each step is worth"
            chart = waterfall(steps, name=f"utility-steps-{part}", title=title)
            save_figure(chart.figure, IMAGES_FOLDER, chart.name, ("png",))
            lines += [f"![{title}](images/{chart.name}.png)", ""]
            lines += table(chart.values.headings, chart.values.rows)
    return lines


def draw_populations() -> None:
    """One figure for each dataset."""
    for part in IMAGES:
        encoder = part == "encoder"
        base, features = ("cifar10", "encoder") if encoder else (part, "scattering")
        published = {d: v[0] for d, v in published_table(PUBLISHED[part])["RobustHDP"].items()}
        drawn = [
            ("NoiseWise, pixels", f"{base}_pixels", "NoiseWise", ""),
            *([("NoiseWise, scattering", base, "NoiseWise", "")] if encoder else []),
            (f"DPFedAvg, {features}", part, "DPFedAvg", "DPFedAvg"),
            (f"NoiseWise, {features}", part, "NoiseWise", "NoiseWise"),
        ]
        series = [
            DotSeries("published Robust-HDP", {d: published[d] for d in DISTS}, "RobustHDP", True)
        ]
        for label, source, method, style in drawn:
            values = {d: list(accuracies(source, d, method).values()) for d in DISTS}
            series.append(DotSeries(label, {d: v for d, v in values.items() if v}, style))
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
        "## Goals of this study",
        "",
        *goals(),
        "## Accuracy at the same budgets",
        "",
        *image_tables(),
        "## Without tuning: the automatic rate against a grid",
        "",
        *default_table(),
        "## What each step is worth",
        "",
        "Each bar is the difference that one step makes when it is added to the steps above it. "
        "All steps before the defaults use the best rate of the grid. With several seeds, "
        "differences have a standard error. The federations have no features step: their features "
        "are the same in all steps. The axes do not begin at 0. "
        f"Seeds: {step_seeds()}. {start_edges()}",
        "",
        *step_figures(),
    ]
    return "\n".join(lines)


def rule_page() -> str:
    """Everything between the marks of the page about the automatic rate."""
    lines = [
        "## Few rounds",
        "",
        *few_rounds(),
        "## Choices of the rule and of the head",
        "",
        *choice_tables(),
        *unhelpful(),
    ]
    return "\n".join(lines)


def federations_page() -> str:
    """Everything between the marks of the page about real federations."""
    lines = [
        "## Real federations",
        "",
        "Clients are states (fars), hospitals (heart), communes (vietnam) and collections of "
        "e-mails (spam); see [Data](data.md). FedAvg has no privacy, and Oracle knows the true "
        "noise: both are references. The server receives nothing about the clients besides their "
        "updates with NoiseWise and RobustHDP. WeiAvg, PFA and BudgetAvg need the clients' "
        "epsilons; DPFedAvg, MinEpsilon and BudgetAvg need their numbers of records. Alone "
        "discloses nothing either, because it has no common model: each client has its own.",
        "",
        *federation_table(),
        "### Few parameters: rough estimates of the noise",
        "",
        *few_parameters(),
        *joining(),
    ]
    return "\n".join(lines)


def main() -> None:
    """Draw the figures and write the pages."""
    draw_populations()
    draw_joining(IMAGES_FOLDER)
    pages = {
        PAGE: page(),
        RULE_PAGE: rule_page(),
        FEDERATIONS_PAGE: federations_page(),
        PERSONS_PAGE: "\n".join(persons()),
    }
    for path, text in pages.items():
        content = path.read_text()
        before, after = content.partition(BEGIN)[0], content.partition(END)[2]
        write_atomic(path, f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}".encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
