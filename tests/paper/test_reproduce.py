"""`noisewise reproduce`: comparison with the paper's values, shared runs, resuming, files."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command import Noisewise

from noisewise.cli.common import words
from noisewise.errors import InvalidValueError
from noisewise.federation.results import load_result
from noisewise.paper import Overrides, artefact_names, load_artefact, reproduce, trained
from noisewise.paper.artefact_runs import Column, make_columns, run_column, setting_name
from noisewise.paper.grids import Cell, Grid, grid_csv, grid_latex, grid_text, grid_verdict
from noisewise.paper.outcome_files import as_data, origin_line, write_index
from noisewise.paper.published import (
    learning_rate_grid,
    published_learning_rates,
    published_table,
)
from noisewise.paper.reproduce import _not_comparable
from noisewise.paper.time_estimate import artefact_seconds, read_times, times_file, write_times
from noisewise.paper.training_time import duration

ROOT = Path(__file__).parents[2]
module = sys.modules["noisewise.paper.reproduce"]  # the package has a function so named
DIGITS = {
    "data.name": "digits",
    "data.test_fraction": 0.3,
    "model.name": "softmax",
    "population.batch_size": 8,
}
SMALL = Overrides(seeds=1, rounds=2, columns=("Dist6",), methods=("WeiAvg", "DPFedAvg"),
               settings=DIGITS)  # fmt: skip


def column(name: str, place: str) -> Column:
    return next(c for c in make_columns(load_artefact(name), Overrides()) if c.name == place)


def test_every_config_is_an_artefact_whose_experiment_is_sound() -> None:
    files = {
        path.stem for path in (ROOT / "src" / "noisewise" / "paper" / "configs").glob("*.toml")
    }
    assert files == set(artefact_names())
    for name in artefact_names():
        artefact = load_artefact(name)
        if artefact.about.kind in ("first round", "trained"):
            columns = make_columns(artefact, Overrides())
            assert all(c.config.training.accountant == "moments" for c in columns)
            assert all(c.config.training.rounds == 200 for c in columns)
        if artefact.about.paper:
            assert published_table(artefact.about.paper)


def test_every_label_of_the_paper_is_listed() -> None:
    labels = " ".join(load_artefact(name).about.label for name in artefact_names())
    known = "table:mnist table:fmnist table:cifar10 table:cifar100 table:fmnist_noise fig:rank "
    known += "fig:comparison fig:conv_speed_mnist_dist6 fig:var_epsilon_b fig:zvsq fig:HvsN "
    known += "table:cifar10_uniform_b table:cifar10_uniform_eps_hetb table:cifar10_alluniform "
    known += (
        "table:cifar10_alluniform_fairness fig:ablation_p_prime fig:weights_comparison_cifar10 "
    )
    known += "table:mnist_8labels_60clients_uniformbatch tab:hetdpfl_algs table:mixture_dists "
    known += "table:mnist_8labels_60clients_nonuniformbatch fig:weights_comparison_details "
    known += "table:ablation_privacy_preference table:ablation_num_clients table:cifar100lr"
    assert set(known.split()) <= set(re.split(r"[ ,]+", labels))


def test_columns_have_the_papers_settings() -> None:
    dist6 = column("accuracy-mnist", "Dist6")
    rates = {job.method.name: job.method.learning_rate for job in dist6.jobs}
    assert rates == {m: r["Dist6"] for m, r in published_learning_rates("mnist").items()}
    assert {job.seed for job in dist6.jobs} == {0, 1, 2}
    assert column("accuracy-cifar100", "Dist4").config.population.epsilon_scale == 10
    assert column("ablation-clients", "60").config.data.clients == 60
    uniform = column("cifar10-uniform-epsilon", "2.0")
    assert uniform.config.population.epsilon == 2.0
    assert uniform.jobs[0].method.learning_rate == 0.002  # Dist1, whose mean is 2.0
    search = make_columns(load_artefact("learning-rates-mnist"), Overrides(columns=("Dist6",)))
    assert [c.config.training.learning_rate for c in search] == list(learning_rate_grid("mnist"))


def test_a_learning_rate_of_the_callers_counts_for_all_methods() -> None:
    overrides = Overrides(columns=("Dist6",), settings={"training.learning_rate": 0.01})
    (own,) = make_columns(load_artefact("accuracy-mnist"), overrides)
    assert own.config.training.learning_rate == 0.01
    assert {job.method.learning_rate for job in own.jobs} == {None}
    assert setting_name(own) != setting_name(column("accuracy-mnist", "Dist6"))


def test_artefacts_share_the_runs_of_a_setting() -> None:
    setting = setting_name(column("accuracy-mnist", "Dist6"))
    assert setting == setting_name(column("convergence-curves", "Dist6"))
    assert setting == setting_name(column("ablation-privacy", "Dist6"))
    assert setting == setting_name(column("ablation-clients", "20"))
    assert setting == setting_name(column("accuracy-bars", "MNIST Dist6"))
    assert setting_name(column("accuracy-mnist", "Dist5")) == setting_name(
        column("falsified-epsilon", "0.95")
    )
    names = [
        setting_name(c)
        for a in ("accuracy-mnist", "accuracy-fmnist", "clients60-mixed-batch", "falsified-epsilon")
        for c in make_columns(load_artefact(a), Overrides())
    ]
    assert len(set(names)) == len(names) - 1  # the truthful column is accuracy-mnist's Dist5


def test_methods_that_are_not_told_epsilon_run_once_under_lies() -> None:
    columns = make_columns(load_artefact("falsified-epsilon"), Overrides())
    assert {j.method.name for j in columns[0].jobs} == {"RobustHDP", "WeiAvg", "PFA", "DPFedAvg"}
    assert {j.method.name for c in columns[1:] for j in c.jobs} == {"WeiAvg", "PFA"}
    assert columns[2].config.population.reported_epsilon == {"client-10": 5.0}


def test_noise_table_has_the_promised_keys(tmp_path: Path) -> None:
    overrides = Overrides(columns=("Dist1", "Dist6"))
    done = reproduce("noise-table", overrides, folder=tmp_path, formats=("csv", "tex", "png"))
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["paper_setting"]["WeiAvg"]["Dist1"] == pytest.approx(1.03, rel=0.01)
    assert set(content["paper_setting"]) == {"WeiAvg", "DPFedAvg", "MinEpsilon", "Oracle"}
    for method in content["paper_setting"]:
        for dist in ("Dist1", "Dist6"):
            values = [content[k][method][dist] for k in ("unrounded", "rdp", "pld")]
            assert values == sorted(values, reverse=True), (method, dist)
    cell = done.outcome.grids[0].rows["MinEpsilon"]["Dist6"]
    assert done.outcome.grids[0].verdict(cell) == "differs"
    assert {"machine", "commit", "date", "accountant", "wall_seconds"} <= set(content["origin"])
    assert set(content["origin"]["machine"]) == {"cores", "processor"}
    lines = list(csv.DictReader((tmp_path / "figures.csv").open()))
    assert len(lines) == 4 * 4 * 2
    assert (tmp_path / "table.tex").read_text().count(r"\begin{tabular}") == 4
    assert (tmp_path / "noise-table.png").stat().st_size > 5000


def test_csv_latex_png_and_pdf_are_written_on_request(tmp_path: Path, noisewise: Noisewise) -> None:
    kept = {"result.json", "README.md", "noise-variance.svg", "sparse-pattern.svg"}
    extra = {"figures.csv", "table.tex"}
    extra |= {f"{n}.{k}" for n in ("noise-variance", "sparse-pattern") for k in ("png", "pdf")}

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    assert {f.name for f in reproduce("noise-variance", folder=tmp_path).files} == names() == kept
    page = (tmp_path / "README.md").read_text()
    assert "![noise-variance](noise-variance.svg)" in page
    everything = noisewise("reproduce", "noise-variance", "-o", tmp_path, "--formats",
                           "csv,tex,png,pdf")  # fmt: skip
    assert names() == kept | extra
    written = f"JSON, CSV, LaTeX, Markdown and figures: {tmp_path}"
    assert everything.stdout.splitlines()[-1] == written
    reproduce("noise-variance", folder=tmp_path)  # no old table beside new results
    assert names() == kept
    refused = noisewise("reproduce", "noise-variance", "-o", tmp_path, "--formats", "csv,xlsx")
    assert refused.returncode == 2
    assert "--formats = 'xlsx': must be among csv, tex, png, pdf" in refused.stderr


def test_committed_artefacts_have_one_readable_and_one_machine_readable_form() -> None:
    folders = [path.parent for path in (ROOT / "reproduction").glob("*/result.json")]
    assert len(folders) > 10
    for folder in folders:
        files = {path.name for path in folder.iterdir()}
        pictures = set(re.findall(r"^!\[.*\]\((.*)\)$", (folder / "README.md").read_text(), re.M))
        assert all(name.endswith(".svg") for name in pictures), folder
        assert files == {"result.json", "README.md"} | pictures


@pytest.mark.parametrize("name", ["noise-variance", "model-sizes"])
def test_exact_artefacts_bear_out_the_papers_claims(name: str, tmp_path: Path) -> None:
    done = reproduce(name, folder=tmp_path)
    assert all(claim.holds for claim in done.outcome.claims)
    with pytest.raises(InvalidValueError, match="closed forms"):
        reproduce(name, Overrides(seeds=2))


def test_verdicts_tell_agreement_from_difference() -> None:
    rows = {"a": {"x": Cell(10.4, paper=10.0), "y": Cell(13.0, paper=10.0)}, "b": {"x": Cell(1.0)}}
    grid = Grid("g", "Title 100%", ("x", "y"), rows, 2, tolerance=1.0)
    assert [grid.verdict(c) for c in rows["a"].values()] == ["agrees", "differs"]
    assert grid.verdict(rows["b"]["x"]) == ""
    assert "1 of 2" in grid_verdict(grid)
    assert "a, y: 13.00 against 10.00" in grid_verdict(grid)
    rounded = Grid("g", "t", ("x",), {"a": {"x": Cell(0.0754, paper=0.07)}}, 2, 0.02, relative=True)
    assert rounded.verdict(rounded.rows["a"]["x"]) == "agrees"  # 0.07 may have been 0.0749
    said = "within 2 % of the paper's, 1 of these only with the rounding of the printed figure"
    assert f"1 of 1 figures {said};" in grid_verdict(rounded)
    assert "rounding" not in grid_verdict(grid)
    assert "+3.00" in grid_text(grid)
    assert r"100\%" in grid_latex(grid)
    assert grid_csv([grid]).splitlines()[3] == "g,b,x,1.0,,1,,,"


def test_a_trained_table_is_written_and_not_run_again(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "out"
    rounds: list[int] = []

    class Listen:
        def __init__(self, column: Column) -> None:
            self.column = column

        def __enter__(self):  # type: ignore[no-untyped-def]
            return lambda method, seed, record: rounds.append(record.round)

        def __exit__(self, *_: object) -> None:
            return None

    done = reproduce("accuracy-mnist", SMALL, folder=folder, store=store, on_column=Listen)
    assert rounds == [1, 2, 1, 2]
    grid = done.outcome.grids[0]
    assert set(grid.rows) == {"WeiAvg", "DPFedAvg"}
    assert grid.rows["WeiAvg"]["Dist6"].paper == 81.4
    assert "not the paper's setting" in done.outcome.not_comparable
    assert grid.verdict(grid.rows["WeiAvg"]["Dist6"]) == ""
    again = reproduce("accuracy-mnist", SMALL, store=store, on_column=Listen)
    assert rounds == [1, 2, 1, 2]  # finished runs were read from the store
    assert again.outcome.grids[0].rows == grid.rows
    curves = reproduce("convergence-curves", SMALL, store=store, on_column=Listen)
    assert rounds == [1, 2, 1, 2]  # the same setting
    assert set(curves.outcome.figures) == {"accuracy-over-rounds", "loss-over-rounds"}
    collected = reproduce("accuracy-mnist", SMALL, store=store, collect=True)
    assert collected.outcome.grids[0].rows == grid.rows
    with pytest.raises(InvalidValueError, match="no finished runs"):
        reproduce("accuracy-mnist", SMALL, store=tmp_path / "empty", collect=True)


@pytest.mark.parametrize(
    ("name", "place", "grids"),
    [
        ("falsified-epsilon", "0.95", {"accuracy"}),
        ("cifar10-fairness", "2.6", {"deviation", "smallest-client"}),
        pytest.param("learning-rates-mnist", "Dist6", {"learning-rates"}, marks=pytest.mark.slow),
        ("accuracy-bars", "MNIST Dist6", {"accuracy"}),
        ("clients60-mixed-batch", "Dist6", {"accuracy"}),
    ],
)
def test_trained_artefacts_work(name: str, place: str, grids: set[str], tmp_path: Path) -> None:
    settings = DIGITS | {"population.delta": 1e-3, "training.accountant": "rdp"}
    methods = ("WeiAvg",) if "rates" in name else ("WeiAvg", "DPFedAvg")
    overrides = Overrides(1, 1, (place,), methods, 1, settings)
    done = reproduce(name, overrides, folder=tmp_path / "out", store=tmp_path / "store")
    assert {grid.name for grid in done.outcome.grids} == grids
    assert not done.outcome.failures
    for grid in done.outcome.grids:
        assert all(math.isfinite(cells[place].ours) for cells in grid.rows.values())
    assert list((tmp_path / "out").glob("*.svg"))


QUICK = DIGITS | {"population.delta": 1e-3, "training.accountant": "rdp"}


def test_an_artefact_says_what_its_runs_took_and_not_only_the_last_call(tmp_path: Path) -> None:
    overrides = Overrides(1, 3, ("Dist6",), ("WeiAvg", "DPFedAvg"), 1, QUICK)
    store, folder = tmp_path / "store", tmp_path / "out" / "accuracy-mnist"
    first = reproduce("accuracy-mnist", overrides, store=store).origin
    known = first["compute"]
    assert (known["count"], known["complete"]) == (2, True)
    assert 0 < known["seconds"] <= first["wall_seconds"]
    assert known["code"] == ((first["commit"] or f"noisewise {first['noisewise']}"),)
    later = reproduce("accuracy-mnist", overrides, folder=folder, store=store, collect=True).origin
    assert later["compute"] == known  # read back: the training took what it took
    line = origin_line(later)
    assert "s for the last call; 2 run(s) trained in " in line
    assert line in write_index(folder.parent).path.read_text()
    assert "code of the training: older" in origin_line(
        later | {"compute": known | {"code": ("older",)}}
    )
    made = sorted(store.glob("*/runs/*/made.json"))
    sitting = json.loads(made[0].read_text())[0]
    made[0].write_text(json.dumps([sitting | {"rounds": 1}]))  # a sitting was killed
    partly = reproduce("accuracy-mnist", overrides, store=store, collect=True).origin["compute"]
    assert not partly["complete"]
    assert partly["seconds"] == pytest.approx(known["seconds"])
    for file in made:
        file.unlink()  # runs of an older version: their files tell the last sitting
    older = reproduce("accuracy-mnist", overrides, store=store, collect=True).origin
    assert not older["compute"]["complete"]
    assert older["compute"]["seconds"] == pytest.approx(known["seconds"], rel=0.5)
    assert older["compute"]["code"] == ("unknown",)
    no_times = older | {"compute": older["compute"] | {"seconds": 0.0}}
    assert "training time of 2 run(s) not recorded" in origin_line(no_times)
    assert "at least 90 s" in origin_line(older | {"compute": older["compute"] | {"seconds": 89.9}})


def test_an_interrupted_sitting_is_recorded(tmp_path: Path) -> None:
    overrides = Overrides(1, 3, ("Dist6",), ("WeiAvg",), 1, QUICK)

    class Stop:
        def __init__(self, column: Column) -> None:
            pass

        def __enter__(self):  # type: ignore[no-untyped-def]
            def listen(method: str, seed: int, record: object) -> None:
                raise KeyboardInterrupt

            return listen

        def __exit__(self, *_: object) -> None:
            return None

    with pytest.raises(KeyboardInterrupt):
        reproduce("accuracy-mnist", overrides, store=tmp_path, on_column=Stop)
    done = reproduce("accuracy-mnist", overrides, store=tmp_path)
    (made,) = tmp_path.glob("*/runs/*/made.json")
    assert [sitting["rounds"] for sitting in json.loads(made.read_text())] == [1, 2]
    assert done.origin["compute"]["complete"]


def test_first_rounds_keep_what_they_took(tmp_path: Path) -> None:
    overrides = Overrides(seeds=1, rounds=2, settings=QUICK)
    first = reproduce("weights-mnist", overrides, store=tmp_path)
    again = reproduce("weights-mnist", overrides, store=tmp_path)
    assert first.origin["compute"]["seconds"] > 0
    assert again.origin["compute"] == first.origin["compute"]
    assert again.outcome.data["training_seconds"] == first.origin["compute"]["seconds"]
    assert "1 first round(s) trained in" in origin_line(again.origin)
    next(tmp_path.glob("*/updates-*.json")).unlink()
    older = reproduce("weights-mnist", overrides, store=tmp_path)
    assert not older.origin["compute"]["complete"]
    assert math.isnan(older.outcome.data["training_seconds"])


def test_weights_of_several_populations_have_a_figure_and_a_column_each(tmp_path: Path) -> None:
    overrides = Overrides(seeds=1, rounds=2, columns=("Dist1", "Dist8"), settings=QUICK)
    both = reproduce("weights-mnist", overrides, store=tmp_path).outcome
    alone = reproduce(
        "weights-mnist", replace(overrides, columns=("Dist8",)), store=tmp_path
    ).outcome
    assert set(both.figures) == {"weights-Dist1", "weights-Dist8"}
    assert set(alone.figures) == {"weights"}
    assert both.data["Dist8"] == alone.data
    (grid,), (expected,) = both.grids, alone.grids
    assert grid.columns == ("Dist1", "Dist8")
    assert all(row["Dist8"] == expected.rows[name]["Dist8"] for name, row in grid.rows.items())
    assert {claim.text.split(":")[0] for claim in both.claims} == {"Dist1", "Dist8"}
    with pytest.raises(InvalidValueError, match="must be a single name"):
        reproduce("submatrix-rows", replace(overrides, settings={}), store=tmp_path)


def test_methods_keep_the_options_that_they_are_given(tmp_path: Path) -> None:
    norm = {"name": "RobustHDP", "options": {"estimator": "norm"}}
    settings = QUICK | {"compare.methods": ["RobustHDP", norm]}
    overrides = Overrides(1, 2, ("Dist6",), settings=settings)
    (grid, *_) = reproduce("accuracy-mnist", overrides, store=tmp_path).outcome.grids
    assert list(grid.rows) == ["RobustHDP", "RobustHDP(estimator=norm)"]
    one, other = (load_result(folder) for folder in sorted(tmp_path.glob("*/runs/*")))
    assert one.rounds[0].weights != other.rounds[0].weights
    assert one.settings["learning_rate"] == other.settings["learning_rate"]
    fast = QUICK | {"compare.methods": [norm | {"learning_rate": 0.1}]}
    with pytest.raises(InvalidValueError, match="sets one for all methods"):
        reproduce("accuracy-mnist", replace(overrides, settings=fast), store=tmp_path)


def test_lies_alone_are_not_compared_with_the_truth(tmp_path: Path) -> None:
    """The first of the chosen columns has all methods; only column 0.95 is the truth."""

    def made(columns: tuple[str, ...], *methods: str):  # type: ignore[no-untyped-def]
        overrides = Overrides(1, 2, columns, methods, 1, QUICK)
        return reproduce("falsified-epsilon", overrides, store=tmp_path).outcome

    lies = made(("5", "20"), "RobustHDP", "WeiAvg", "DPFedAvg")
    rows = lies.grids[0].rows
    assert {m: set(cells) for m, cells in rows.items()} == {
        m: {"5", "20"} for m in ("RobustHDP", "WeiAvg", "DPFedAvg")
    }
    assert rows["RobustHDP"]["5"] == rows["RobustHDP"]["20"]
    assert [c.text for c in lies.claims] == ["RobustHDP and DPFedAvg cannot be misled"]
    alone = made(("5",), "RobustHDP").grids[0]
    assert alone.rows == {"RobustHDP": {"5": rows["RobustHDP"]["5"]}}
    assert made(("5", "20"), "RobustHDP").grids[0].columns == ("5", "20")
    whole = made(("20", "0.95"), "WeiAvg")
    cells = whole.grids[0].rows["WeiAvg"]
    assert whole.claims[0].measured == (
        f"{cells['0.95'].ours:.2f} % with the true epsilon, {cells['20'].ours:.2f} % with the "
        "largest reported one"
    )


def test_methods_without_a_printed_rate_are_named_and_not_judged(tmp_path: Path) -> None:
    overrides = Overrides(
        1, 2, ("Dist1",), ("NoiseWise", "RobustHDP", "WeiAvg", "FedAvg"), 1, QUICK
    )
    artefact = load_artefact("accuracy-mnist")
    (column,) = make_columns(artefact, overrides)
    assert column.unpublished == {"NoiseWise": 0.001, "FedAvg": 0.001}
    results = run_column(column, tmp_path, 1).results
    outcome = trained.accuracy(artefact, [trained.Trained(column, results)])
    (grid,) = outcome.grids
    assert grid.rows["FedAvg"]["Dist1"].paper == 98.6
    judged = {method for method, cells in grid.rows.items() if grid.verdict(cells["Dist1"])}
    assert judged == {"RobustHDP", "WeiAvg"}
    assert " of 2 figures" in grid_verdict(grid)
    assert "NoiseWise" not in outcome.claims[0].measured
    (note,) = reproduce("accuracy-mnist", overrides, store=tmp_path).outcome.notes
    assert note.endswith("get no verdict: NoiseWise (0.001), FedAvg (0.001).")
    own = Overrides(columns=("Dist1",), settings={"training.learning_rate": 0.1})
    assert make_columns(artefact, own)[0].unpublished == {}


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 in the middle; the second call plays only the rounds that are missing."""
    typed = [sys.executable, "-m", "noisewise.cli", "reproduce", "accuracy-mnist", "--dists",
             "Dist6", "--methods", "WeiAvg", "--seeds", "1", "--rounds", "40", "--workers", "1",
             "--store", str(tmp_path / "store"), "--output", str(tmp_path / "out")]  # fmt: skip
    typed += [w for k, v in DIGITS.items() for w in ("--set", f"{k}={v}")]
    typed += ["--set", "training.accountant=rdp"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(typed, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    store = tmp_path / "store"

    def played() -> int:
        files = list(store.glob("*/runs/WeiAvg-seed0/rounds.jsonl"))
        return len(files[0].read_text().splitlines()) if files else 0

    until = time.monotonic() + 100
    while played() < 3 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = played()
    assert 3 <= before < 40
    first = (
        next(store.glob("*/runs/WeiAvg-seed0/rounds.jsonl")).read_text().splitlines()[: before - 1]
    )
    done = subprocess.run([*typed, "--json"], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["grids"]["accuracy"]["rows"]["WeiAvg"]["Dist6"]["runs"] == 1
    assert played() == 40
    after = next(store.glob("*/runs/WeiAvg-seed0/rounds.jsonl")).read_text().splitlines()
    assert after[: before - 1] == first


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="noise-table"):
        reproduce("nonsense")
    for name in ("noise-table", "weights-cifar10"):
        with pytest.raises(InvalidValueError, match=f"--collect = True: has no effect on {name}"):
            reproduce(name, collect=True)
    with pytest.raises(InvalidValueError, match="Dist10"):
        reproduce("noise-table", Overrides(columns=("Dist10",)))
    with pytest.raises(InvalidValueError, match="Nonsense"):
        reproduce("accuracy-mnist", Overrides(methods=("Nonsense",)))


def test_other_seeds_are_comparable_and_other_settings_are_not() -> None:
    assert _not_comparable(load_artefact("accuracy-mnist"), Overrides(settings={"seed": 7})) == ""
    assert _not_comparable(load_artefact("accuracy-mnist"), Overrides(rounds=200)) == ""
    for overrides in (Overrides(rounds=100), Overrides(settings={"training.accountant": "pld"})):
        for name in ("accuracy-mnist", "accuracy-bars", "noise-table-estimated"):
            assert "not the paper's" in _not_comparable(load_artefact(name), overrides)
    with pytest.raises(InvalidValueError, match="all methods"):
        reproduce("weights-mnist", Overrides(methods=("PFA",)))


def test_all_wanted_columns_decide_whether_figures_are_comparable() -> None:
    bars, mnist = load_artefact("accuracy-bars"), load_artefact("accuracy-mnist")
    cnn = {"model.name": "cnn"}  # right for MNIST, wrong for CIFAR
    assert "model.name = cnn" in _not_comparable(bars, Overrides(settings=cnn))
    assert _not_comparable(bars, Overrides(columns=("MNIST Dist6",), settings=cnn)) == ""
    one_rate = {"training.learning_rate": 0.001}  # the TOML's, but not the methods' in the paper
    assert "0.001" in _not_comparable(mnist, Overrides(settings=one_rate))


def test_costs_are_measured_and_scale() -> None:
    mnist = load_artefact("accuracy-mnist")
    one = artefact_seconds(mnist, Overrides(seeds=1, columns=("Dist6",), methods=("WeiAvg",)))
    both = artefact_seconds(mnist, Overrides(seeds=2, columns=("Dist6",), methods=("WeiAvg",)))
    assert 100 < one < 200_000
    assert both == pytest.approx(2 * one)
    half = artefact_seconds(
        mnist, Overrides(seeds=1, rounds=100, columns=("Dist6",), methods=("WeiAvg",))
    )
    assert half == pytest.approx(one / 2)
    assert 0 < artefact_seconds(load_artefact("noise-table")) < 1000


def test_stored_times_are_used_for_the_same_artefacts_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path / "new" / "cache"))
    times = {"one": 1.5, "two": 0.0}
    assert read_times(times) is None
    write_times(times)
    assert read_times(["one", "two"]) == times
    assert read_times(["one", "three"]) is None
    with monkeypatch.context() as other:
        other.setattr("platform.node", lambda: "another machine")
        assert read_times(times) is None
    for damaged in ("", "[]", "null", '{"seconds": 1}', times_file().read_text()[:-9]):
        times_file().write_text(damaged)
        assert read_times(times) is None
    write_times({"one": float("nan")})
    assert read_times(["one"]) is None


def test_the_list_times_the_models_once(
    noisewise: Noisewise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path))
    write_times(dict.fromkeys(artefact_names(), 60.0))
    stored = noisewise("reproduce")
    assert "timing" not in stored.stderr
    assert str(times_file()) in stored.stdout


def test_what_the_docs_say_about_the_papers_own_tables() -> None:
    """The nine learning rates outside the grids, and the six cells of the ablation."""
    outside = [
        (dataset, method, dist)
        for dataset in ("mnist", "fmnist", "cifar10", "cifar100")
        for method, rates in published_learning_rates(dataset).items()
        for dist, rate in rates.items()
        if rate not in learning_rate_grid(dataset)
    ]
    assert len(outside) == 9
    assert [o for o in outside if o[0] != "cifar100"] == [("cifar10", "DPFedAvg", "Dist8")]
    main, ablation = published_table("mnist_accuracy"), published_table("mnist_ablation_privacy")
    apart = [(m, c) for m, r in ablation.items() for c in r if r[c][0] != main[m][c][0]]
    assert len(apart) == 6


def test_the_index_lists_artefacts_with_their_verdicts(tmp_path: Path) -> None:
    reproduce("model-sizes", folder=tmp_path / "model-sizes")
    text = write_index(tmp_path).path.read_text()
    assert "3 of 4 figures equal to the paper's" in text
    assert "[model-sizes](model-sizes/README.md)" in text
    with pytest.raises(InvalidValueError, match="--index"):
        write_index(tmp_path / "nowhere")


def rows(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The rows of the table in an artefact's folder."""
    content = json.loads((folder / "result.json").read_text())
    return content["grids"]["accuracy"]["rows"]  # type: ignore[no-any-return]


TWO = Overrides(1, 1, ("Dist6", "Dist8"), ("WeiAvg", "DPFedAvg"), 1, QUICK)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("accuracy-mnist", {"population.epsilon": "Dist1"}),
        ("accuracy-mnist", {"population": {"epsilon": "Dist1"}}),
        ("accuracy-bars", {"population.epsilon": "Dist1"}),
        ("weights-mnist", {"population.epsilon": "Dist1"}),
        ("ablation-clients", {"data.clients": 5}),
        ("falsified-epsilon", {"population.reported_epsilon.client-10": 3.0}),
        ("learning-rates-mnist", {"training.learning_rate": 0.5}),
        ("learning-rates-mnist", {"population.epsilon": "Dist1"}),
    ],
)
def test_what_the_columns_stand_for_cannot_be_set(
    name: str, setting: dict[str, object], tmp_path: Path
) -> None:
    """All columns would be alike, under the names of different ones."""
    (key,) = setting
    with pytest.raises(
        InvalidValueError, match=f"--set = .{key}=.* cannot be set, because .* sweeps "
    ):
        reproduce(name, Overrides(settings=setting), store=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_column_or_method_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="--methods = 'WeiAvg': is listed twice"):
        Overrides(methods=("WeiAvg", "PFA", "WeiAvg"))
    with pytest.raises(InvalidValueError, match="--dists = 'Dist6': is listed twice"):
        make_columns(load_artefact("accuracy-mnist"), Overrides(columns=("Dist6", "Dist6")))
    with pytest.raises(InvalidValueError, match="--dists = 'Dist6': is listed twice"):
        reproduce("noise-table", Overrides(columns=("Dist6", "Dist6")))
    listed = {"compare.methods": ["PFA", "PFA"]}
    with pytest.raises(InvalidValueError, match=r"compare\.methods = 'PFA': is listed twice"):
        make_columns(load_artefact("accuracy-mnist"), Overrides(settings=listed))
    with pytest.raises(InvalidValueError, match="WeiAvg is listed twice"):
        words("--methods", "WeiAvg, WeiAvg")


def test_a_call_in_which_all_runs_fail_leaves_the_artefact_alone(
    tmp_path: Path, noisewise: Noisewise
) -> None:
    overrides = replace(TWO, columns=("Dist6",))
    store, folder = tmp_path / "store", tmp_path / "out"
    files = reproduce("accuracy-mnist", overrides, folder=folder, store=store).files
    assert folder / "README.md" in files
    assert folder / "page" / "report.html" in files
    assert set(files) == {path for path in folder.rglob("*") if path.is_file()}
    before = {path: path.read_bytes() for path in files}
    broken = replace(overrides, settings=QUICK | {"model.name": "nosuch"})
    done = reproduce("accuracy-mnist", broken, folder=folder, store=store)
    assert len(done.outcome.failures) == 2
    assert done.files == ()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    typed = [w for k, v in broken.settings.items() for w in ("--set", f"{k}={v}")]
    failed = noisewise("reproduce", "accuracy-mnist", "--dists", "Dist6", "--methods", "WeiAvg",
                       "--seeds", 1, "--rounds", 1, *typed, "-o", folder, "--store", store,
                       "--workers", 1)  # fmt: skip
    assert failed.returncode == 1
    assert "nothing was written" in failed.stdout
    assert str(folder) not in failed.stdout


@pytest.mark.slow
def test_the_page_is_written_once_and_keeps_nothing_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[int] = []
    artefacts: list[int] = []
    write_report, write_outcome = module.write_report, module.write_outcome

    def page(sets, *args, **kwargs):  # type: ignore[no-untyped-def]
        pages.append(len(sets))
        return write_report(sets, *args, **kwargs) if len(pages) < 3 else ()

    def files(folder, artefact, outcome, *rest):  # type: ignore[no-untyped-def]
        artefacts.append(len(outcome.grids[0].columns))
        return write_outcome(folder, artefact, outcome, *rest)

    monkeypatch.setattr(module, "write_report", page)
    monkeypatch.setattr(module, "write_outcome", files)
    store, folder = tmp_path / "store", tmp_path / "out"
    one = replace(TWO, columns=("Dist6",))
    reproduce("accuracy-mnist", one, folder=folder, store=store)
    single = {path.name for path in (folder / "page").iterdir()}
    assert {"report.html", "report.md", "summary.json", "table.csv", "figures"} == single
    (folder / "page" / "mine.txt").write_text("kept")
    assert (pages, artefacts) == ([1], [1])

    @contextmanager
    def seen(column: Column) -> Iterator[None]:
        there = (folder / "page" / "report.html").exists()
        states.append((column.name, set(rows(folder)["WeiAvg"]), there))
        yield

    states: list[tuple[str, set[str], bool]] = []
    three = replace(TWO, columns=("Dist6", "Dist8", "Dist1"))
    reproduce("accuracy-mnist", three, folder=folder, store=store, on_column=seen)
    assert pages == [1, 3]
    assert artefacts == [1, 2, 3]  # after Dist8, which was trained, and at the end
    assert states == [
        ("Dist6", {"Dist6"}, True),
        ("Dist8", {"Dist6"}, True),
        ("Dist1", {"Dist6", "Dist8"}, False),  # no page of other runs beside the new figures
    ]
    several = {path.name for path in (folder / "page").iterdir()}
    assert several == {"report.html", "sweep.csv", "figures", "mine.txt"}
    assert {path.stem for path in (folder / "page" / "figures").iterdir()} == {"sweep"}
    reproduce("accuracy-mnist", three, folder=folder, store=store, collect=True)
    reproduce("accuracy-mnist", three, folder=folder, store=store)
    assert pages == [1, 3, 3, 3]
    assert artefacts == [1, 2, 3, 3, 3]  # nothing was trained: once, at the end


def test_claims_have_no_verdict_where_there_is_none(tmp_path: Path) -> None:
    overrides = Overrides(1, 1, ("0.95", "20"), ("RobustHDP", "WeiAvg"), 1, QUICK)
    done = reproduce(
        "falsified-epsilon", overrides, folder=tmp_path / "out", store=tmp_path / "store"
    )
    assert any(claim.holds is not None for claim in done.outcome.claims)
    content = json.loads((tmp_path / "out" / "result.json").read_text())
    assert content["verdicts"][0].startswith("No verdict")
    assert [claim["holds"] for claim in content["claims"]] == [None] * len(done.outcome.claims)
    judged = as_data(done.artefact, replace(done.outcome, not_comparable=""), done.origin)
    assert judged["claims"][-1]["holds"] is True


def test_methods_that_are_not_told_a_lie_have_their_runs_with_the_truth(tmp_path: Path) -> None:
    artefact = load_artefact("falsified-epsilon")
    truth = column("falsified-epsilon", "0.95")
    (lie,) = make_columns(artefact, Overrides(columns=("20",)))
    own, shared = lie.by_setting
    assert {job.method.name for job in own.jobs} == {"WeiAvg", "PFA"}
    assert {job.method.name for job in shared.jobs} == {"RobustHDP", "DPFedAvg"}
    assert [job.label for job in lie.jobs] == [job.label for job in truth.jobs]
    assert setting_name(shared) == setting_name(truth)
    assert setting_name(own) == setting_name(column("falsified-epsilon", "20")) == setting_name(lie)
    assert truth.by_setting == (truth,)
    methods = ("RobustHDP", "WeiAvg")
    first = Overrides(1, 1, ("0.95",), methods, 1, QUICK)
    known = reproduce("falsified-epsilon", first, store=tmp_path).outcome.grids[0].rows
    played: list[str] = []

    @contextmanager
    def listen(column: Column):  # type: ignore[no-untyped-def]
        yield lambda method, seed, record: played.append(method)

    second = replace(first, columns=("20",))
    early = reproduce("falsified-epsilon", second, store=tmp_path, collect=True)
    assert set(early.outcome.grids[0].rows) == {"RobustHDP"}
    done = reproduce("falsified-epsilon", second, store=tmp_path, on_column=listen)
    assert played == ["WeiAvg"]
    grid = done.outcome.grids[0]
    assert list(grid.rows) == ["RobustHDP", "WeiAvg"]
    assert grid.rows["RobustHDP"]["20"] == known["RobustHDP"]["0.95"]
    assert done.origin["compute"]["count"] == 2


def test_the_index_leaves_out_what_is_no_artefact(tmp_path: Path, noisewise: Noisewise) -> None:
    reproduce("model-sizes", folder=tmp_path / "model-sizes")
    whole = (tmp_path / "model-sizes" / "result.json").read_text()
    others = {
        "cut": whole[:100],
        "run": '{"method": "WeiAvg", "seed": 0}',
        "list": "[]",
        "half": '{"artefact": "model-sizes", "title": "t"}',
    }
    for name, text in others.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    index = write_index(tmp_path)
    assert index.artefacts == ("model-sizes",)
    assert set(index.left_out) == set(others)
    assert index.path.read_text().count("## ") == 1
    done = noisewise("reproduce", "--index", tmp_path, "--json")
    content = json.loads(done.stdout)
    assert content["index"] == str(tmp_path / "README.md")
    assert (content["artefacts"], set(content["left_out"])) == (["model-sizes"], set(others))
    assert f"left out: {tmp_path / 'cut'}" in noisewise("reproduce", "--index", tmp_path).stderr
    for option in (["model-sizes"], ["--seeds", 2], ["--collect"], ["-o", tmp_path / "new"]):
        refused = noisewise("reproduce", *option, "--index", tmp_path)
        assert refused.returncode == 2
        assert "has no effect with --index" in refused.stderr
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(InvalidValueError, match="is not an index"):
        write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"


def test_collecting_says_what_is_missing_and_goes_past_damage(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "out"
    some = replace(TWO, columns=("Dist6",), methods=("WeiAvg",))
    reproduce("accuracy-mnist", some, store=store)
    overrides = replace(TWO, seeds=2)
    collected = reproduce("accuracy-mnist", overrides, folder=folder, store=store, collect=True)
    note = "1 of 8 runs are finished. Missing: Dist6: DPFedAvg (seed 0, 1), WeiAvg (seed 1); "
    text = (folder / "README.md").read_text()
    assert f"{note}Dist8: all." in collected.outcome.notes
    assert f"- {note}Dist8: all.\n" in text
    assert "noisewise reproduce accuracy-mnist --collect`" in text
    assert collected.origin["options"] == ["--collect"]
    everything = reproduce("accuracy-mnist", some, store=store, collect=True)
    assert not [n for n in everything.outcome.notes if "finished" in n]

    reproduce("accuracy-mnist", TWO, store=store)
    (damaged,) = store.glob("*Dist6*/runs/DPFedAvg-seed0/rounds.jsonl")
    damaged.write_text("{")
    past = reproduce("accuracy-mnist", TWO, store=store, collect=True).outcome
    assert list(past.failures) == ["Dist6, DPFedAvg, seed 0"]
    assert {m: set(cells) for m, cells in past.grids[0].rows.items()} == {
        "WeiAvg": {"Dist6", "Dist8"},
        "DPFedAvg": {"Dist8"},
    }


def test_where_records_lie_and_who_listens_make_no_other_run(tmp_path: Path) -> None:
    overrides = replace(TWO, columns=("Dist6",), methods=("WeiAvg",))
    before = reproduce("accuracy-mnist", overrides, store=tmp_path).outcome.grids[0].rows
    own = QUICK | {"data.folder": str(tmp_path), "track.tensorboard": str(tmp_path / "events")}
    again = reproduce(
        "accuracy-mnist", replace(overrides, settings=own), store=tmp_path, collect=True
    )
    assert again.outcome.grids[0].rows == before
    (run,) = tmp_path.glob("*/runs/*/run.json")
    begun = run.stat().st_mtime_ns
    moved = replace(overrides, settings=QUICK | {"data.folder": str(tmp_path)})
    assert reproduce("accuracy-mnist", moved, store=tmp_path).outcome.grids[0].rows == before
    assert run.stat().st_mtime_ns == begun  # read back
    mnist = load_artefact("accuracy-mnist")
    for field, value in {
        "data.folder": "mine",
        "track.mlflow": "mine",
        "training.device": "cuda",
        "training.physical_batch": 8,
    }.items():
        assert _not_comparable(mnist, Overrides(settings={field: value})) == "", field
    (here,) = make_columns(mnist, Overrides(columns=("Dist6",), settings={"data.folder": "mine"}))
    assert setting_name(here) == setting_name(column("accuracy-mnist", "Dist6"))


def test_folder_names_of_settings_are_those_of_earlier_versions() -> None:
    """Stores are shared between versions; a new name would train weeks of runs again."""
    known = {
        ("accuracy-mnist", "Dist6"): "mnist-20-cnn-Dist6-200rounds-ba6634b056",
        ("falsified-epsilon", "20"): "mnist-20-cnn-Dist5-200rounds-ef26309838",
        ("cifar10-fairness", "2.6"): "cifar10-20-resnet18-epsilons-200rounds-fff7828354",
        ("accuracy-cifar100", "Dist4"): "cifar100-20-resnet34-Dist4-200rounds-b085f3f814",
    }
    assert {key: setting_name(column(*key)) for key in known} == known


def test_an_unusable_output_is_noticed_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    store = tmp_path / "store"
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(FileExistsError) as caught:
            reproduce("accuracy-mnist", TWO, folder=folder, store=store)
        assert caught.value.filename == str(tmp_path / "taken")
    assert not store.exists()
    with pytest.raises(FileExistsError):
        reproduce("weights-mnist", Overrides(rounds=1, settings=QUICK), store=tmp_path / "taken")
    with pytest.raises(InvalidValueError, match="no finished runs"):  # only read: may be read-only
        reproduce("accuracy-mnist", TWO, store=tmp_path / "taken", collect=True)


def test_artefacts_that_are_elsewhere_refuse_what_they_do_not_use(
    tmp_path: Path, noisewise: Noisewise
) -> None:
    for overrides in (
        Overrides(seeds=5),
        Overrides(rounds=5),
        Overrides(methods=("Nonsense",)),
        Overrides(columns=("Foo",)),
        Overrides(settings={"no.such": 1}),
    ):
        with pytest.raises(InvalidValueError, match="has no effect on security-model"):
            reproduce("security-model", overrides, folder=tmp_path / "out")
    with pytest.raises(InvalidValueError, match="has no effect on security-model"):
        reproduce("security-model", folder=tmp_path / "out", collect=True)
    assert not (tmp_path / "out").exists()
    done = noisewise("reproduce", "security-model", "-o", tmp_path / "out")
    assert done.stdout.splitlines()[-1] == f"JSON and Markdown: {tmp_path / 'out'}"
    done = noisewise("reproduce", "model-sizes", "-o", tmp_path / "sizes")
    assert f"JSON and Markdown: {tmp_path / 'sizes'}" in done.stdout


def test_long_times_are_in_years() -> None:
    day = 86_400.0
    assert duration(700 * day) == "700 days"
    assert duration(3520 * day) == "9.64 years"
    assert duration(1e6 * day) == "2,738 years"
