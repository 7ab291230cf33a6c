"""Turn studies/results/ into the tables and figures of docs/noisewise_results.md.

    python studies/tables.py

The command replaces everything between the two marks in the page. Table cells without results stay
empty, and the page says how many runs are missing. Every column of the main tables also becomes a
config with the learning rates that the pilots chose, in configs/study/chosen/, for
`noisewise compare`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from method import HALF, PARTS, one_round, result_file, result_of
from numpy.typing import ArrayLike

from noisewise.experiments.config import dump_config, load_config
from noisewise.palette import MUTED
from noisewise.paper.published import published_table
from noisewise.report.chart import method_styles, new_axes, save_figure
from noisewise.report.curves import label_ends
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "studies" / "results", ROOT / "docs" / "noisewise_results.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
METHODS = ["NoiseWise", "RobustHDP", "WeiAvg", "BudgetAvg", "DPFedAvg", "PFA", "MinEpsilon"]
CNN_ROWS = ["NoiseWise", HALF, "RobustHDP", "WeiAvg"]
DISTS = [f"Dist{k}" for k in range(1, 10)]
Cells = dict[tuple[str, str], list[dict[str, Any]]]  # runs of each table cell (column, row)


def read(part: str) -> Cells:
    """Return the results of a part by (population, method), ordered by name and seed."""
    cells: Cells = defaultdict(list)
    for result in result_file(part).read():
        dist, _, rest = result["name"].partition("-")
        cells[dist, rest].append(result)
    return cells


def accuracy(runs: list[dict[str, Any]]) -> str:
    """Return the mean in percent, with the standard error if there are several seeds."""
    values = 100 * np.array([run["accuracy"] for run in runs])
    note = " †" if any(run["status"] == "diverged" for run in runs) else ""
    if len(values) < 2:
        return f"{values.mean():.1f}{note}" if len(values) else ""
    return f"{values.mean():.1f} ± {values.std(ddof=1) / np.sqrt(len(values)):.1f}{note}"


def grid(cells: Cells, rows: list[str], columns: list[str], corner: str) -> list[str]:
    """Return a Markdown table of accuracies."""
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        words = [accuracy(cells.get((column, row), [])) for column in columns]
        if any(words):
            lines.append(f"| {row} | {' | '.join(words)} |")
    return lines


def provenance(cells: Cells) -> str:
    """Return a sentence about the number of runs, their seeds and dates."""
    runs = [run for several in cells.values() for run in several]
    if not runs:
        return "No run yet."
    dates = sorted({run["date"] for run in runs})
    seeds = sorted({run["seed"] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"({len(runs)} runs, seeds {', '.join(map(str, seeds))}, {when}; "
        "† a run diverged. Every run is in `studies/results/`, with its commit and machine.)"
    )


def by_seed(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    """Return the differences in percentage points for the seeds that both methods have."""
    known = {run["seed"]: run["accuracy"] for run in theirs}
    return [100 * (r["accuracy"] - known[r["seed"]]) for r in ours if r["seed"] in known]


def standard_error(values: ArrayLike) -> float:
    """Return the standard error of the mean; NaN for a single value."""
    sample = np.asarray(values, dtype=np.float64)
    return float(np.std(sample, ddof=1) / np.sqrt(sample.size)) if sample.size > 1 else math.nan


def against(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean difference in points over the common seeds, and its standard error."""
    gaps = by_seed(ours, theirs)
    return float(np.mean(gaps)), standard_error(gaps)


def verdict(cells: Cells) -> list[str]:
    """Return sentences that compare NoiseWise with the other methods."""
    lines, gains, pairs, good = [], [], [], 0
    for dist in DISTS:
        ours = cells.get((dist, "NoiseWise"), [])
        others = {m: cells[dist, m] for m in METHODS[1:] if cells.get((dist, m))}
        if not ours or len(others) < len(METHODS) - 1:
            continue
        best = max(others, key=lambda m: np.mean([run["accuracy"] for run in others[m]]))
        gap, error = against(ours, others[best])
        gains.append(against(ours, others["RobustHDP"])[0])
        pairs.append(by_seed(ours, others["RobustHDP"]))
        good += gap >= 0 or gap >= -error
        spread = "" if np.isnan(error) else f" ± {error:.1f}"
        lines.append(f"{dist} {gap:+.1f}{spread} ({best})")
    if not lines:
        return []
    return [
        "",
        "Accuracy of NoiseWise minus that of the best other method, in percentage points, paired "
        f"by seed: {'; '.join(lines)}. "
        f"NoiseWise is best or within one standard error of the best in {good} of {len(lines)}.",
        "",
        f"NoiseWise minus Robust-HDP: {np.mean(gains):+.2f} points on average over {len(gains)} "
        f"populations ({min(gains):+.1f} to {max(gains):+.1f}; standard error over the seeds' "
        f"averages {standard_error(np.mean(pairs, axis=0)):.2f}).",
    ]


def shares(cells: Cells) -> list[str]:
    """Return a table of the attained share of the signal-to-noise ratio."""
    lines = []
    for method in ("NoiseWise", "RobustHDP", "WeiAvg", "BudgetAvg", "DPFedAvg"):
        words = []
        for dist in DISTS:
            runs = [r["signal_share"] for r in cells.get((dist, method), [])]
            words.append(f"{np.mean(runs):.3f}" if runs and None not in runs else "")
        if any(words):
            lines.append(f"| {method} | {' | '.join(words)} |")
    head = [f"| share | {' | '.join(DISTS)} |", "|---" * 10 + "|"]
    return head + lines if lines else []


def curves(part: str, name: str) -> list[str]:
    """Draw accuracy over rounds of a part, one figure for each population."""
    cells = read(part)
    dists = [d for d in DISTS if any(key[0] == d for key in cells)]
    lines = []
    for dist in dists:
        figure, axes = new_axes(7.0, 4.0)
        looks, ends, colours = method_styles(METHODS), {}, {}
        for (own, method), runs in cells.items():
            if own != dist:
                continue
            look, style = looks[method.partition(",")[0]], "--" if "," in method else "-"
            rounds = [point[0] for point in runs[0]["curve"]]
            values = 100 * np.mean([[p[1] for p in run["curve"]] for run in runs], axis=0)
            axes.plot(rounds, values, style, lw=1.8, color=look.colour)
            ends[method], colours[method] = (rounds[-1], float(values[-1])), look.text
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy on held-out records [%]")
        axes.set_title(f"{dist}, {name}", fontsize=10, loc="left")
        label_ends(axes, ends, colours, height=4.0)
        lines.append(picture(figure, f"study-{part}-{dist.lower()}", f"{name}, {dist}"))
    return lines


def picture(figure: Figure, name: str, words: str) -> str:
    """Save a figure beside the page; returns the Markdown that shows it."""
    save_figure(figure, ROOT / "docs" / "images", name, ["png"])
    return f"![{words}](images/{name}.png)"


def gains(cells: Cells, part: str) -> list[str]:
    """Draw the difference to Robust-HDP for each population, if no result is missing."""
    shown = ["NoiseWise", "BudgetAvg", "WeiAvg", "DPFedAvg"]
    if any((dist, method) not in cells for dist in DISTS for method in [*shown, "RobustHDP"]):
        return []
    figure, axes = new_axes(7.0, 3.6)
    looks, ends = method_styles(METHODS), {}
    axes.axhline(0, color=MUTED, lw=1)
    for number, method in enumerate(shown):
        pairs = [against(cells[dist, method], cells[dist, "RobustHDP"]) for dist in DISTS]
        places = np.arange(len(DISTS)) + 0.14 * (number - 1.5)
        values, errors = np.array(pairs).T
        axes.errorbar(
            places, values, np.nan_to_num(errors), fmt=looks[method].marker, ms=5, lw=1,
            color=looks[method].colour,
        )  # fmt: skip
        ends[method] = (places[-1], values[-1])
    axes.set_xticks(range(len(DISTS)), DISTS)
    axes.set_ylabel("accuracy less Robust-HDP's [points]")
    colours = {method: looks[method].text for method in shown}
    label_ends(axes, ends, colours, height=3.6)
    words = "Accuracy less Robust-HDP's for each population, with standard errors over seeds"
    return ["", picture(figure, f"study-{part}-gains", words)]


def half_time(cells: Cells) -> list[str]:
    """Return a sentence: when NoiseWise reached Robust-HDP's final accuracy."""
    words = []
    for dist in DISTS:
        ours, theirs = cells.get((dist, "NoiseWise")), cells.get((dist, "RobustHDP"))
        if ours and theirs:
            final = theirs[0]["accuracy"]
            first = next((r for r, a in ours[0]["curve"] if a >= final), None)
            words.append(f"{dist}: {'never' if first is None else f'round {first}'}")
    if not words:
        return []
    return [f"NoiseWise reached the final accuracy of Robust-HDP in {'; '.join(words)}.", ""]


def rounds_in_numbers(cells: Cells) -> list[str]:
    """Return a table of what a round of each CNN run does to the model, and its accuracy."""
    lines = [
        "| population | method | learning rate | distance | noise | signal / best | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for dist in DISTS:
        for row in CNN_ROWS:
            for run in cells.get((dist, row), []):
                distance, noise = one_round(dist, run["method"])
                rate, share = run["learning_rate"], run["signal_share"]
                words = f"{rate:g} | {rate * distance:.3f} | {rate * noise:.3f} | {share:.2f}"
                lines.append(f"| {dist} | {row} | {words} | {100 * run['accuracy']:.1f} |")
    return lines


def ablation(part: str, whole: Cells) -> Cells:
    """Return the variants and the full methods that they vary; empty without variants."""
    variants, names = read(part), {"NoiseWise": "NoiseWise", "Robust-HDP": "RobustHDP"}
    full = {
        (dist, name): whole[dist, method]
        for name, method in names.items()
        for dist in dict.fromkeys(dist for dist, _ in variants)
        if whole.get((dist, method))
    }
    return full | variants


def accountants(moments: Cells, pld: Cells) -> list[str]:
    """Return a table of the same method and population under both accountants."""
    dists = [d for d in DISTS if any(key[0] == d for key in moments)]
    lines = [
        "| method | population | `moments` | `pld` | gain in points |",
        "|---|---|---|---|---|",
    ]
    for method in METHODS:
        for dist in dists:
            old, new = moments.get((dist, f"{method}-moments"), []), pld.get((dist, method), [])
            if old and new:
                gain, error = against(new, old)
                words = f"{accuracy(old)} | {accuracy(new)} | {gain:+.1f} ± {error:.1f}"
                lines.append(f"| {method} | {dist} | {words} |")
    return lines


def published(cnn: Cells) -> list[str]:
    """Return a table of Robust-HDP as published and NoiseWise with `pld`."""
    file = ROOT / "reproduction" / "accuracy-mnist" / "result.json"
    runs: dict[str, Any] = {}
    if file.exists():
        runs = json.loads(file.read_text())["grids"]["accuracy"]["rows"].get("RobustHDP", {})
    head = ["population", "printed", "our reproduction", "NoiseWise, `pld`"]
    head += ["gain over the printed figure", "gain over our reproduction"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for dist in DISTS:
        if ours := cnn.get((dist, "NoiseWise")):
            mine, printed = (
                100 * ours[0]["accuracy"],
                published_table("mnist_accuracy")["RobustHDP"][dist][0],
            )
            own = runs.get(dist, {}).get("ours")
            words = f"{printed:.1f} | {'' if own is None else f'{own:.1f}'} | {accuracy(ours)}"
            over = "" if own is None else f"{mine - own:+.1f}"
            lines.append(f"| {dist} | {words} | {mine - printed:+.1f} | {over} |")
    return lines if len(lines) > 2 else []


def attacks() -> list[str]:
    """Return a table of every method under every attack, and the number of false refusals."""
    file = RESULTS / "attacks.json"
    if not file.exists():
        return []
    rows = json.loads(file.read_text())
    kinds, methods = (list(dict.fromkeys(r[key] for r in rows)) for key in ("attack", "method"))
    values = {(r["method"], r["attack"]): 100 * r["accuracy"] for r in rows}
    head = [kind.replace("_", " ") for kind in kinds]
    lines = [f"| method | {' | '.join(head)} |", "|---" * (len(kinds) + 1) + "|"]
    for method in methods:
        lines.append(f"| {method} | {' | '.join(f'{values[method, k]:.1f}' for k in kinds)} |")
    guarded = [r for r in rows if r["method"].endswith("guard")]
    refused = sum(r["honest_refused"] for r in guarded)
    words = (
        f"Updates of honest clients that a guard refused, in all {len(guarded)} runs: {refused}."
    )
    return ["### Accuracy under attack", "", *lines, "", f"({words})", ""]


def chosen_configs() -> dict[Path, str]:
    """Return a config for each column of the main tables, with the rates of the pilots."""
    configs = {}
    for part, base in (("softmax", "softmax_iid.toml"), ("hetero", "softmax_60.toml")):
        cells = read(part)
        for dist in DISTS:
            methods = [
                {"name": m, "learning_rate": cells[dist, m][0]["learning_rate"]}
                | ({"options": o} if (o := cells[dist, m][0]["options"]) else {})
                for m in METHODS
                if (dist, m) in cells
            ]
            wanted = {"population.epsilon": dist, "compare.methods": methods}
            config = load_config(ROOT / "configs" / "study" / base, wanted)
            words = f"# {dist} of {base} with the learning rates of the study's pilots.\n"
            name = f"{Path(base).stem}-{dist.lower()}.toml"
            configs[ROOT / "configs" / "study" / "chosen" / name] = words + dump_config(config)
    return configs


def unfinished() -> list[str]:
    """Return a sentence about the missing runs; nothing if the study is complete."""
    left = {
        name: sum(result_of(study_run) is None for study_run in study_runs())
        for name, study_runs in PARTS.items()
    }
    words = ", ".join(f"{count} of {name}" for name, count in left.items() if count)
    text = f"**Not complete yet.** Runs that are still missing: {words}."
    return [text, ""] if words else []


def page() -> str:
    """Return the results section."""
    softmax, cnn, hetero = read("softmax"), read("cnn"), read("hetero")
    intro = """\
| item | value |
|---|---|
| accuracy | percent on the held-out fifth of each client's records; mean over clients, ± standard \
error over seeds |
| softmax regression | 100 rounds, clipping norm 1 |
| CNN | 200 rounds, clipping norm 3 |
| privacy | delta 1e-4, accountant `pld`, unless a table says otherwise |
| learning rates, softmax regression | chosen by train loss in pilots of 40 rounds with their own \
seed: 0.003, 0.01, 0.03, 0.1, and 1.8 times below and above the best of these; while the best rate \
is the smallest or the largest, the pilots try the next one at the same factor |
| learning rates, CNN | the paper's; for NoiseWise the rate at which its rounds have as much noise \
as those of Robust-HDP |

A pilot splits the images with its own seed, so it trains on most of the images that a run holds \
out. This is the same for all methods.

| to | run |
|---|---|
| run the study (`--help` lists options for other seeds and folders) | `python studies/method.py \
softmax hetero ablation ...` |
| write this section | `python studies/tables.py` |
| rerun one column | `noisewise compare configs/study/chosen/softmax_iid-dist6.toml` |"""
    out = ["## Results", "", intro, "", *unfinished()]
    out += ["### Softmax regression, MNIST, 20 clients, iid, mixed batches", ""]
    out += [*grid(softmax, METHODS, DISTS, "method"), "", provenance(softmax), *verdict(softmax)]
    out += gains(softmax, "softmax")
    out += ["", "Share of the attainable signal-to-noise ratio (weights from estimates, ratio from "
            "true noise; mean over rounds):", "", *shares(softmax), ""]  # fmt: skip
    if cnn:
        out += ["### The paper's CNN, MNIST, 20 clients, iid", ""]
        out += [*grid(cnn, CNN_ROWS, ["Dist1", "Dist6", "Dist9"], "method"), ""]
        out += [provenance(cnn), "", *half_time(cnn), *curves("cnn", "CNN"), ""]
        out += [
            "What a round does to the model, computed from the plans: the distance along the "
            "gradient (learning rate times the average number of local steps in the aggregate) and "
            "the length of its noise.",
            "",
        ]
        out += [*rounds_in_numbers(cnn), ""]
    if hetero:
        out += ["### 60 clients, at most 8 labels each, mixed batches", ""]
        out += [*grid(hetero, METHODS, DISTS, "method"), "", provenance(hetero), *verdict(hetero)]
        out += gains(hetero, "hetero")
        out += ["", "Robust-HDP estimates its weights in the first round only, as in the authors' "
                "code: a pursuit of 60 columns takes as long as a round of all methods. \"True "
                "noise\" in the ablation below is the same method with perfect estimates in every "
                "round.", ""]  # fmt: skip
    for title, cells in (
        ("Two labels per client", read("two_labels")),
        ("Ablation, 20 clients, iid", ablation("ablation", softmax)),
        ("Ablation, 60 clients, at most 8 labels each", ablation("ablation_60", hetero)),
    ):
        if cells:
            known = list(dict.fromkeys(row for _, row in cells))
            rows = [m for m in METHODS if m in known] + [row for row in known if row not in METHODS]
            columns = [d for d in DISTS if any(key[0] == d for key in cells)]
            out += [f"### {title}", "", *grid(cells, rows, columns, "method"), ""]
            out += [provenance(cells), ""]
    if moments := read("accountant"):
        out += ["### Effect of the accountant", ""]
        out += [*accountants(moments, softmax), "", provenance(moments), ""]
    if lines := published(cnn):
        out += ["### Published Robust-HDP and NoiseWise, CNN, same (epsilon_i, delta_i)", ""]
        out += [*lines, ""]
    return "\n".join([*out, *attacks()])


def main() -> None:
    """Write the section of the page and the chosen configs."""
    text = PAGE.read_text()
    if BEGIN not in text:
        text = text.rstrip() + f"\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    write_atomic(PAGE, f"{before}{BEGIN}\n{page()}\n{END}{after}".encode())
    for file, content in chosen_configs().items():
        write_atomic(file, content.encode())
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
