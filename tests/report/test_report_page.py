"""The page and its sources: correct numbers, notes about unusual runs, no external resources."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from command import Noisewise
from federation_helpers import small_run

from noisewise.errors import InvalidValueError
from noisewise.federation import RunResult, load_run
from noisewise.report.citation import PAPER, PAPER_BIBTEX, software_bibtex
from noisewise.report.comparison_report import charts_of, write_comparison, write_report
from noisewise.report.figures import weights_chart
from noisewise.report.page import Section, disclosure_table, final_table, render_page
from noisewise.report.run_sets import RunSet, find_runs

ROOT = Path(__file__).parents[2]
METHODS = ("RobustHDP", "WeiAvg", "DPFedAvg", "FedAvg", "Oracle")


class StopError(Exception):
    pass


def page_of(sets: Sequence[RunSet]) -> str:
    """The page without its files."""
    return render_page("Page", [Section(one, charts_of(one.results)) for one in sets])


def cut_short(folder: Path, method: str = "RobustHDP", seed: int = 0, after: int = 2) -> None:
    """A run that ends in the middle, as a crash leaves it."""

    def stop(record: object) -> None:
        if record.round == after:  # type: ignore[attr-defined]
            raise StopError

    with pytest.raises(StopError):
        small_run(method, rounds=4, seed=seed, folder=folder, on_round=stop)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison on disk."""
    folder = tmp_path_factory.mktemp("report") / "demo"
    for seed in (0, 1):
        for method in METHODS:
            small_run(method, rounds=3, seed=seed, folder=folder / "runs" / f"{method}-seed{seed}")
    return folder


@pytest.fixture(scope="module")
def runs(home: Path) -> tuple[RunResult, ...]:
    return find_runs([home]).sets[0].results


def test_a_finished_run_reads_back_whole(home: Path, runs: tuple[RunResult, ...]) -> None:
    assert len(runs) == 10
    again = small_run("WeiAvg", rounds=3, seed=1)
    assert next(r for r in runs if (r.method, r.seed) == ("WeiAvg", 1)) == again


def test_charts_have_a_tip_for_each_mark_and_exact_values(runs: tuple[RunResult, ...]) -> None:
    charts = {chart.name: chart for chart in charts_of(runs)}
    assert list(charts) == [
        "accuracy", "paired", "epsilon", "noise", "weights", "estimates", "budgets", "fairness",
        "confusion", "loss",
    ]  # fmt: skip
    means = np.mean([[100 * r.mean_accuracy for r in run.rounds] for run in runs
                     if run.method == "WeiAvg"], axis=0)  # fmt: skip
    table = charts["accuracy"].values
    column = table.headings.index("WeiAvg [%]")
    assert [row[column].split()[0] for row in table.rows] == [f"{mean:.1f}" for mean in means]
    assert [len(words) for words in charts["accuracy"].tips.values()] == [3] * 5
    robust = [row for row in charts["estimates"].values.rows if row[0].startswith("RobustHDP")]
    assert len(robust) == len(charts["estimates"].values.rows) == 8  # 4 clients x 2 seeds


def test_weights_beside_the_oracles_closed_form(runs: tuple[RunResult, ...]) -> None:
    chart = weights_chart(runs)
    assert chart is not None
    run = next(r for r in runs if (r.method, r.seed) == ("Oracle", 0))
    inverse = {c: 1 / v for c, v in run.rounds[0].true_noise.items()}
    for row in chart.values.rows:
        assert float(row[2]) == pytest.approx(
            100 * inverse[row[0]] / sum(inverse.values()), abs=0.01
        )
        assert float(row[2]) == pytest.approx(100 * run.rounds[0].weights[row[0]], abs=0.01)
    oracle = [float(row[2]) for row in chart.values.rows]
    assert oracle == sorted(oracle, reverse=True)


def test_the_final_table_lists_every_seed(runs: tuple[RunResult, ...]) -> None:
    table = final_table(runs)
    assert [row[0] for row in table.rows] == ["DPFedAvg", "RobustHDP", "WeiAvg", "FedAvg", "Oracle"]
    row = dict(zip(table.headings, table.rows[2], strict=True))
    a, b = (100 * r.accuracy for r in runs if r.method == "WeiAvg")
    assert row["method"] == "WeiAvg"
    assert row["seeds"] == "2"
    assert row["accuracy for each seed [%]"] == f"0: {a:.1f}, 1: {b:.1f}"
    assert row["accuracy ± standard error"] == f"{(a + b) / 2:.1f} ± {abs(a - b) / 2:.1f} %"


def test_disclosures_are_the_methods_needs(runs: tuple[RunResult, ...]) -> None:
    told = {row[0]: row for row in disclosure_table(runs).rows}
    assert told["RobustHDP"][1].startswith("nothing")
    assert "privacy budget" in told["WeiAvg"][1]
    assert "number of training records" in told["DPFedAvg"][1]
    assert "true noise" in told["Oracle"][1]
    assert told["FedAvg"][2].startswith("none")
    strict = disclosure_table([small_run("MinEpsilon", rounds=1)])
    assert strict.rows[0][2].startswith("one epsilon for all")


def test_worst_tenth_by_hand(runs: tuple[RunResult, ...]) -> None:
    scores = {f"c{k}": k / 25 for k in range(25)}  # worst tenth: 3 of 25 clients
    last = replace(runs[0].rounds[-1], accuracy=scores)
    assert replace(runs[0], rounds=(last,)).worst_tenth_accuracy == pytest.approx((0 + 1 + 2) / 75)


class Outside(HTMLParser):
    """Collects addresses that a browser would fetch, and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and value[0] != "#":
                self.addresses.append(value)
            if name == "id" and value:
                self.ids.append(value)


def test_the_page_is_one_file_with_unique_ids(runs: tuple[RunResult, ...], tmp_path: Path) -> None:
    pair = [RunSet(runs[:3], "a", "seed = 1"), RunSet(runs[5:7], "b", "seed = 2")]
    write_report(pair, tmp_path, draw_parts=False)
    for page in (page_of(pair[:1]), (tmp_path / "report.html").read_text()):
        reader = Outside()
        reader.feed(page)
        assert reader.addresses == ["data:,"]
        assert len(set(reader.ids)) == len(reader.ids)
        links = set(re.findall(r'href="#([^"]+)"', page)) | set(
            re.findall(r"url\(#([^)]+)\)", page)
        )
        assert links <= set(reader.ids)
    assert {f"{n}.{kind}" for n in ("sweep",) for kind in ("png", "svg", "pdf")} == {
        path.name for path in (tmp_path / "figures").glob("sweep.*")
    }


def test_same_runs_same_bytes(runs: tuple[RunResult, ...], tmp_path: Path) -> None:
    some = runs[:2]
    files = write_comparison(some, tmp_path / "a")
    write_comparison(some, tmp_path / "b")
    assert {path.suffix for path in files} >= {".html", ".png", ".svg", ".pdf", ".csv", ".json"}
    for path in files:
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_names_from_outside_are_escaped(runs: tuple[RunResult, ...]) -> None:
    odd = replace(runs[0], method="<script>alert(1)</script>&")
    page = page_of([RunSet((odd,))])
    assert page.count("<script>") == 1  # the page's own
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page


def test_an_unfinished_run_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "runs" / "RobustHDP-seed0"
    cut_short(folder)
    with open(folder / "rounds.jsonl", "ab") as file:
        file.write(b'{"round": 3, "weig')  # a crash in the middle of a line
    run = load_run(folder)
    assert (run.status, len(run.rounds)) == ("unfinished", 2)
    found = find_runs([tmp_path])
    page = page_of(found.sets)
    assert "1 of 1 runs not finished" in page
    assert "2 of 4" in page
    # It goes on from there, and the report then has the whole.
    whole = small_run("RobustHDP", rounds=4, folder=folder)
    assert load_run(folder) == whole
    assert whole.status == "finished"


def test_a_run_without_a_round_is_told_too(tmp_path: Path) -> None:
    cut_short(tmp_path / "RobustHDP-seed0", after=1)
    (tmp_path / "RobustHDP-seed0" / "rounds.jsonl").unlink()
    found = find_runs([tmp_path])
    assert found.sets[0].results[0].rounds == ()
    assert "not finished" in page_of(found.sets)


def test_a_diverged_run_is_told(tmp_path: Path) -> None:
    for method in ("FedAvg", "DPFedAvg"):
        lost = small_run(method, rounds=5, learning_rate=1e38, folder=tmp_path / f"{method}-seed0")
        assert lost.status == "diverged"
    found = find_runs([tmp_path])
    page = page_of(found.sets)
    assert "2 of 2 runs diverged" in page
    assert ">nan<" not in page


def test_runs_of_an_older_version_are_left_out_with_a_note(home: Path, tmp_path: Path) -> None:
    cut_short(tmp_path / "demo" / "runs" / "RobustHDP-seed0")
    (tmp_path / "demo" / "runs" / "RobustHDP-seed0" / "run.json").unlink()
    with pytest.raises(InvalidValueError, match="1 damaged or just begun"):
        find_runs([tmp_path])
    found = find_runs([home, home])  # and the same folder twice counts once
    assert len(found.sets) == 1
    assert len(found.sets[0].results) == 10


def test_sets_are_told_apart_by_their_configs(home: Path, tmp_path: Path) -> None:
    for value in (0.5, 2):
        folder = tmp_path / f"clip{value}"
        (folder / "runs").mkdir(parents=True)
        (folder / "config.toml").write_text(
            f"seed = 0\n[training]\nclip_norm = {value}\nrounds = 3"
        )
        (folder / "runs" / "x").symlink_to(home / "runs" / f"WeiAvg-seed{int(value > 1)}")
    found = find_runs([tmp_path])
    assert [one.name for one in found.sets] == [
        "training.clip_norm = 0.5",
        "training.clip_norm = 2",
    ]
    assert [dict(one.settings) for one in found.sets] == [
        {"training.clip_norm": 0.5},
        {"training.clip_norm": 2},
    ]


def test_the_citation_is_that_of_the_project() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    for line in re.findall(r'(?:title|collection-title): "([^"]+)"', text):
        assert line in PAPER
        assert line in PAPER_BIBTEX
    for name in re.findall(r"family-names: (\w+)", text):
        assert name in PAPER
        assert name in PAPER_BIBTEX
    assert "year      = {2024}" in PAPER_BIBTEX
    assert re.search(r"^version: (.+)$", text, flags=re.MULTILINE)[1] in software_bibtex()  # type: ignore[index]


@pytest.mark.slow
def test_the_templates_are_installed(tmp_path: Path) -> None:
    words = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *words, str(ROOT)], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {f"noisewise/report/templates/{p.name}"
               for p in (ROOT / "src/noisewise/report/templates").iterdir()}  # fmt: skip
    assert shipped
    assert shipped <= set(names)


def test_report_on_the_command_line(noisewise: Noisewise, home: Path, tmp_path: Path) -> None:
    run = home / "runs" / "RobustHDP-seed0"
    code, out, err = noisewise("report", run, "-o", tmp_path / "one")
    assert (code, err) == (0, "")
    assert out.strip() == f"1 run: {tmp_path / 'one' / 'report.html'}"
    cut_short(tmp_path / "more" / "WeiAvg-seed5", "WeiAvg", 5)
    code, out, err = noisewise("report", home, tmp_path / "more", "-o", tmp_path / "b", "--json")
    answer = json.loads(out)
    assert (answer["runs"], answer["unfinished"], answer["diverged"]) == (11, 1, 0)
    assert Path(answer["page"]).exists()
    assert all(Path(file).stat().st_size > 0 for file in answer["files"])


@pytest.mark.parametrize("case", ["nothing there", "a file", "no runs", "damaged"])
def test_what_is_no_run_is_refused_in_one_line(
    case: str, noisewise: Noisewise, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if case == "a file":
        target.write_text("x")
    elif case == "no runs":
        (target / "deep").mkdir(parents=True)
    elif case == "damaged":
        target.mkdir()
        (target / "result.json").write_text("{")
    code, out, err = noisewise("report", target, "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith(f"noisewise: RUN_OR_FOLDER = '{target}'")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_timing_is_shown_where_it_was_measured(noisewise: Noisewise, tmp_path: Path) -> None:
    small = ["--set", "training.rounds=2", "--set", "data.clients=3", "--set",
             "population.epsilon=[1.0,4.0,9.0]"]  # fmt: skip
    config = ROOT / "configs" / "demo.toml"
    assert noisewise("run", config, *small, "--profile", "-o", tmp_path)[0] == 0
    assert noisewise("report", tmp_path / "RobustHDP-seed0")[0] == 0
    page = (tmp_path / "RobustHDP-seed0" / "report.html").read_text()
    assert "Where the time went" in page
    assert "local training" in page
    shown = re.search(r'<pre class="config">(.*?)</pre>', page, flags=re.DOTALL)
    assert shown is not None
    text = shown[1].replace("&#34;", '"').replace("&#39;", "'")
    assert tomllib.loads(text)["training"]["rounds"] == 2
