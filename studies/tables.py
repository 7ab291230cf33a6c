"""Turn studies/results/ into the tables and figures of docs/noisewise_method.md.

    python studies/tables.py

Everything between the two marks in the page is replaced; cells that are not there yet are left
empty, and the number of cells is said. Every column of the main tables also becomes a config with
the learning rates that the pilots chose, in configs/study/chosen/, for `noisewise compare`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from method import HALF, PARTS, one_round, result_file
from numpy.typing import ArrayLike

from noisewise.experiments.config import dump_config, load_config
from noisewise.experiments.paper.published import published_table
from noisewise.report.chart import MUTED, label_ends, method_looks, new_axes, save_figure
from noisewise.storage import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "studies" / "results", ROOT / "docs" / "noisewise_method.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
METHODS = ["NoiseWise", "RobustHDP", "WeiAvg", "BudgetAvg", "DPFedAvg", "PFA", "MinEpsilon"]
CNN_ROWS = ["NoiseWise", HALF, "RobustHDP", "WeiAvg"]
DISTS = [f"Dist{k}" for k in range(1, 10)]
Cells = dict[tuple[str, str], list[dict[str, Any]]]


def read(part: str) -> Cells:
    """Results of a part by (first word of the cell, rest of it), ordered by seed."""
    found: Cells = defaultdict(list)
    for file in sorted((RESULTS / part).glob("*.json")):
        content = json.loads(file.read_text())
        dist, _, rest = content["cell"].partition("-")
        found[dist, rest].append(content)
    return found


def accuracy(runs: list[dict[str, Any]]) -> str:
    """Mean in percent, with the standard error where there are several seeds."""
    values = 100 * np.array([run["accuracy"] for run in runs])
    note = " †" if any(run["status"] == "diverged" for run in runs) else ""
    if len(values) < 2:
        return f"{values.mean():.1f}{note}" if len(values) else ""
    return f"{values.mean():.1f} ± {values.std(ddof=1) / np.sqrt(len(values)):.1f}{note}"


def grid(cells: Cells, rows: list[str], columns: list[str], corner: str) -> list[str]:
    """A Markdown table of accuracies."""
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        words = [accuracy(cells.get((column, row), [])) for column in columns]
        if any(words):
            lines.append(f"| {row} | {' | '.join(words)} |")
    return lines


def provenance(cells: Cells) -> str:
    """How many runs, when and from which commits."""
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
    """Differences in points for the seeds that both have."""
    known = {run["seed"]: run["accuracy"] for run in theirs}
    return [100 * (r["accuracy"] - known[r["seed"]]) for r in ours if r["seed"] in known]


def standard_error(values: ArrayLike) -> float:
    """Of the mean; not a number for a single value."""
    some = np.asarray(values, dtype=np.float64)
    return float(np.std(some, ddof=1) / np.sqrt(some.size)) if some.size > 1 else float("nan")


def against(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean difference in points over the seeds that both have, and its standard error."""
    gaps = by_seed(ours, theirs)
    return float(np.mean(gaps)), standard_error(gaps)


def verdict(cells: Cells) -> list[str]:
    """NoiseWise against the others, population by population, in words."""
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
        f"NoiseWise less the best other method, in points, paired by seed: {'; '.join(lines)}. "
        f"It is the best or within one standard error of the best in {good} of {len(lines)}.",
        "",
        f"Against Robust-HDP: {np.mean(gains):+.2f} points on average over {len(gains)} "
        f"populations ({min(gains):+.1f} to {max(gains):+.1f}; standard error over the seeds' "
        f"averages {standard_error(np.mean(pairs, axis=0)):.2f}).",
    ]


def shares(cells: Cells) -> list[str]:
    """The attained share of the signal-to-noise ratio."""
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
    """Accuracy over rounds of a part, one panel a population."""
    cells = read(part)
    dists = [d for d in DISTS if any(key[0] == d for key in cells)]
    lines = []
    for dist in dists:
        figure, axes = new_axes(7.0, 4.0)
        looks, ends, colours = method_looks(METHODS), {}, {}
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
    """Save a figure beside the page, and the Markdown that shows it."""
    _, *others = save_figure(figure, ROOT / "docs" / "images", name)
    for file in others:  # the page needs one
        file.unlink()
    return f"![{words}](images/{name}.png)"


def gains(cells: Cells, part: str) -> list[str]:
    """Every population's difference to Robust-HDP, as a figure, once all seeds of it are there."""
    shown = ["NoiseWise", "BudgetAvg", "WeiAvg", "DPFedAvg"]
    if any((dist, method) not in cells for dist in DISTS for method in [*shown, "RobustHDP"]):
        return []
    figure, axes = new_axes(7.0, 3.6)
    looks, ends = method_looks(METHODS), {}
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
    """When NoiseWise reached Robust-HDP's final accuracy."""
    words = []
    for dist in DISTS:
        ours, theirs = cells.get((dist, "NoiseWise")), cells.get((dist, "RobustHDP"))
        if ours and theirs:
            final = theirs[0]["accuracy"]
            first = next((r for r, a in ours[0]["curve"] if a >= final), None)
            words.append(f"{dist}: {'never' if first is None else f'round {first}'}")
    if not words:
        return []
    return [f"Robust-HDP's final accuracy was reached by NoiseWise in {'; '.join(words)}.", ""]


def rounds_in_numbers(cells: Cells) -> list[str]:
    """What a round of each CNN run does to the model, beside where that led."""
    lines = [
        "| population | method | learning rate | way | noise | signal / best | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for dist in DISTS:
        for row in CNN_ROWS:
            for run in cells.get((dist, row), []):
                way, noise = one_round(dist, run["method"])
                rate, share = run["learning_rate"], run["signal_share"]
                words = f"{rate:g} | {rate * way:.3f} | {rate * noise:.3f} | {share:.2f}"
                lines.append(f"| {dist} | {row} | {words} | {100 * run['accuracy']:.1f} |")
    return lines


def ablation(part: str, whole: Cells) -> Cells:
    """The variants, beside the whole methods that they vary; nothing before there are some."""
    variants, names = read(part), {"NoiseWise": "NoiseWise", "Robust-HDP": "RobustHDP"}
    found = {
        (dist, name): whole[dist, method]
        for name, method in names.items()
        for dist in dict.fromkeys(dist for dist, _ in variants)
        if whole.get((dist, method))
    }
    return found | variants


def accountants(moments: Cells, pld: Cells) -> list[str]:
    """The same method and population under both accountants."""
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
    """Robust-HDP as published (printed, and our runs of it) against NoiseWise with `pld`."""
    file = ROOT / "reproduction" / "accuracy-mnist" / "result.json"
    runs: dict[str, Any] = {}
    if file.exists():
        runs = json.loads(file.read_text())["grids"]["accuracy"]["rows"].get("RobustHDP", {})
    head = ["population", "printed", "our run of it", "NoiseWise, `pld`"]
    head += ["gain over the printed", "over our run"]
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
    """Accuracy of every method under every attack, and how often honest clients were refused."""
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
    """Each column of the main tables as a config with the rates that the pilots chose."""
    found = {}
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
            found[ROOT / "configs" / "study" / "chosen" / name] = words + dump_config(config)
    return found


def unfinished() -> list[str]:
    """Says so while cells of the study are missing."""
    left = {
        name: sum(not result_file(cell).exists() for cell in cells())
        for name, cells in PARTS.items()
    }
    words = ", ".join(f"{count} of {name}" for name, count in left.items() if count)
    text = f"**Not complete yet.** Runs that are still missing: {words}."
    return [text, ""] if words else []


def page() -> str:
    """The results section."""
    softmax, cnn, hetero = read("softmax"), read("cnn"), read("hetero")
    intro = (
        "Accuracy in percent on the held-out fifth of each client's records, mean over clients, "
        "± standard error over seeds. Softmax regression: 100 rounds, clipping norm 1; CNN: 200 "
        "rounds, clipping norm 3; delta 1e-4 and `pld` throughout, unless a table says otherwise. "
        "Learning rates: pilots of 40 rounds under a seed of their own, six rates for every "
        "method (0.003, 0.01, 0.03, 0.1, and 1.8 times below and above the best of them; on by the "
        "same factor if the best is at an end), chosen by train loss. A pilot splits the images in "
        "its own way, so it trains on most of those that a run holds out: all methods have that "
        "advantage alike. The CNN's rates are the paper's; NoiseWise has the rate at which its "
        "rounds carry as much noise as Robust-HDP's. "
        "`python studies/method.py softmax hetero ablation ...` runs the cells (`--help` for other "
        "seeds and folders), `python studies/tables.py` writes this section, and `noisewise "
        "compare configs/study/chosen/softmax_iid-dist6.toml` runs a column again."
    )
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
            "What a round does to the model, from the plans alone: its way (learning rate times "
            "the average local steps of signal in it) and the length of its noise.",
            "",
        ]
        out += [*rounds_in_numbers(cnn), ""]
    if hetero:
        out += ["### 60 clients, at most 8 labels each, mixed batches", ""]
        out += [*grid(hetero, METHODS, DISTS, "method"), "", provenance(hetero), *verdict(hetero)]
        out += gains(hetero, "hetero")
        out += ["", "Robust-HDP's weights come from the first round here, as in the authors' "
                "code, since a pursuit of 60 columns takes as long as a round of all methods. "
                "\"True noise\" in the part-by-part table below is the same method with perfect "
                "estimates in every round.", ""]  # fmt: skip
    for title, cells in (
        ("Two labels a client: how far it breaks", read("two_labels")),
        ("Part by part, 20 clients, iid", ablation("ablation", softmax)),
        ("Part by part, 60 clients, at most 8 labels each", ablation("ablation_60", hetero)),
    ):
        if cells:
            known = list(dict.fromkeys(row for _, row in cells))
            rows = [m for m in METHODS if m in known] + [row for row in known if row not in METHODS]
            columns = [d for d in DISTS if any(key[0] == d for key in cells)]
            out += [f"### {title}", "", *grid(cells, rows, columns, "method"), ""]
            out += [provenance(cells), ""]
    if moments := read("accountant"):
        out += ["### The accountant as a step of its own", ""]
        out += [*accountants(moments, softmax), "", provenance(moments), ""]
    if lines := published(cnn):
        out += ["### Robust-HDP as published against NoiseWise, CNN, same (epsilon_i, delta_i)", ""]
        out += [*lines, ""]
    return "\n".join([*out, *attacks()])


def main() -> None:
    """Rewrite the section of the page."""
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
