"""`compare --set key=a,b,c` runs all combinations, can be resumed and writes one page."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import Noisewise
from federation_helpers import small_run

from noisewise.cli.common import swept_values
from noisewise.errors import InvalidValueError
from noisewise.experiments.sweep import SweepPoint, sweep_points
from noisewise.report.run_sets import RunSet
from noisewise.report.sweep_report import overview_chart

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.toml"
SMALL = ["--set", "training.rounds=2", "--set", "data.clients=3",
         "--set", "population.epsilon=[1.0,4.0,9.0]", "--methods", "DPFedAvg,FedAvg",
         "--seeds", 1, "--workers", 1]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", [1]),
        ("1,2.5,4e-1", [1, 2.5, 0.4]),
        ("[1,2,3]", [[1, 2, 3]]),
        ("[1,2],[3,4]", [[1, 2], [3, 4]]),
        ('"a,b"', ["a,b"]),
        ("'a,b',c", ["a,b", "c"]),
        (r'"a\",b",2', ['a",b', 2]),
        ("Dist1,Dist2", ["Dist1", "Dist2"]),
        ('{a = 1, b = [2,3]},{a = 2, b = "x,y"}', [{"a": 1, "b": [2, 3]}, {"a": 2, "b": "x,y"}]),
        ("true,false", [True, False]),
        ("a=1,b=2", ["a=1", "b=2"]),
    ],
)
def test_commas_split_only_between_values(text: str, values: list[object]) -> None:
    assert swept_values([f"some.key={text}"]) == {"some.key": values}


@pytest.mark.parametrize("setting", ["a.b=1,,2", "a.b=1,", "a.b=,1", "a.b=1,2,1", "a.b", "=1,2"])
def test_bad_lists_are_refused(setting: str) -> None:
    with pytest.raises(InvalidValueError, match="--set"):
        swept_values([setting])


def test_points_are_the_product_in_order() -> None:
    values = {"training.clip_norm": [1.0, 2.0], "seed": [5, 6, 7]}
    points = sweep_points(DEMO, values, ["DPFedAvg"], 1, {"training.rounds": 2})
    assert [(p.settings["training.clip_norm"], p.settings["seed"]) for p in points] == [
        (clip, seed) for clip in (1.0, 2.0) for seed in (5, 6, 7)
    ]
    assert all("training.rounds" not in point.settings for point in points)
    assert {point.config.training.rounds for point in points} == {2}
    assert [p.config.training.clip_norm for p in points] == [1.0] * 3 + [2.0] * 3
    assert [p.jobs[0].seed for p in points] == [5, 6, 7] * 2


def test_folder_names_are_safe_and_never_the_same() -> None:
    (point,) = sweep_points(DEMO, {}, ["DPFedAvg"], 1)
    values = [0.5, 1, "a/b", "a b", "a-b", "../up", [1.0, 2.0], [1.0, 3.0], list(range(99)), "é"]
    names = [SweepPoint({"k": v}, point.config, point.jobs).folder_name for v in values]
    assert names[:2] == ["k=0.5", "k=1"]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 100 for name in names)


def test_a_sweep_and_its_page(noisewise: Noisewise, tmp_path: Path) -> None:
    words = ["compare", DEMO, *SMALL, "--set", "training.clip_norm=0.5,2.0", "-o", tmp_path]
    code, out, err = noisewise(*words)
    assert code == 0, err
    assert f"Page: {tmp_path / 'report.html'}" in out
    folders = [tmp_path / f"training.clip_norm={value}" for value in (0.5, 2.0)]
    for folder in folders:
        assert (folder / "report.html").exists()
        assert (folder / "runs" / "DPFedAvg-seed0" / "result.json").exists()
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    table = [(row["training.clip_norm"], row["method"]) for row in rows]
    assert table == [(v, m) for v in ("0.5", "2.0") for m in ("DPFedAvg", "FedAvg")]
    for row, folder in zip(rows[::2], folders, strict=True):
        stored = json.loads((folder / "runs" / "DPFedAvg-seed0" / "result.json").read_text())
        assert float(row["accuracy"]) == stored["accuracy"]
    page = (tmp_path / "report.html").read_text()
    assert "Accuracy against training.clip_norm" in page
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        "sweep.png", "sweep.svg", "sweep.pdf"
    }  # fmt: skip
    # Again: finished runs are read, and a lost one is made anew with the same result.
    kept, lost = (f / "runs" / "DPFedAvg-seed0" / "result.json" for f in folders)
    before, stamp = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    assert noisewise(*words)[0] == 0
    assert kept.stat().st_mtime_ns == stamp
    assert lost.read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["training.clip_norm=1.0,0.0"], "training.clip_norm = 0.0"),
        (["training.clip_norm=1.0,1.0"], "twice"),
        (["data.partition=quantity,nonsense"], "nonsense"),
        (["model.name=softmax,nonsense"], "nonsense"),
        (["training.device=cpu,nonsense"], "nonsense"),
        (["training.loss=torch.nn.functional:cross_entropy,nonsense"], "nonsense"),
        (["data.clients=3,5"], "population.epsilon"),
        (["compare.methods=[\"DPFedAvg\"],[\"Nonsense\"]"], "Nonsense"),
    ],
)  # fmt: skip
def test_bad_values_end_before_anything_runs(
    settings: list[str], words: str, noisewise: Noisewise, tmp_path: Path
) -> None:  # fmt: skip
    options = [part for setting in settings for part in ("--set", setting)]
    small = [w for w in SMALL if w not in ("--methods", "DPFedAvg,FedAvg")]
    code, out, err = noisewise("compare", DEMO, *small, *options, "-o", tmp_path / "out")
    assert code == 2, err
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_failing_point_spares_the_others(noisewise: Noisewise, tmp_path: Path) -> None:
    small = [w for w in SMALL if w not in ("--methods", "DPFedAvg,FedAvg")]
    both = 'compare.methods=["DPFedAvg"],["failing_part:Failing"]'
    code, out, err = noisewise("compare", DEMO, *small, "--set", both, "-o", tmp_path, "--json")
    assert code == 1
    assert "on purpose" in err
    assert "compare.methods" in err
    (point,) = json.loads(out)["points"]
    assert point["rows"][0]["method"] == "DPFedAvg"


def swept_sets(values: list[dict[str, object]], score: float = 0.5) -> list[RunSet]:
    """Sets of one made-up run each."""
    base = small_run("DPFedAvg", rounds=1)
    found = []
    for k, settings in enumerate(values):
        accuracy = dict.fromkeys(base.clients, score + 0.01 * k)
        run = replace(base, rounds=(replace(base.rounds[0], accuracy=accuracy),))
        found.append(RunSet((run,), f"set {k}", settings=settings, folder=f"folder-{k}"))
    return found


def test_the_figure_has_a_panel_for_each_value_of_the_second_field() -> None:
    product = [{"a": a, "b": b} for a in (0.1, 1.0, 10.0) for b in ("x", "y")]
    chart = overview_chart(swept_sets(product))
    assert [axes.get_title(loc="left") for axes in chart.figure.axes] == ["b = x", "b = y"]
    assert chart.figure.axes[0].get_xscale() == "log"
    assert [t.get_text() for t in chart.figure.axes[1].get_xticklabels()] == ["0.1", "1", "10"]
    assert chart.figure.axes[-1].get_xlabel() == "a"
    assert chart.tips["1-0"] == tuple(f"DPFedAvg, set {k}: {50 + k:.1f} %" for k in (1, 3, 5))


def test_lists_and_words_stand_in_their_order() -> None:
    chart = overview_chart(swept_sets([{"a": v} for v in ([3, 1], [1, 2], "Dist1")]))
    (axes,) = chart.figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["[3, 1]", "[1, 2]", "Dist1"]
    assert axes.get_xscale() == "linear"


def test_folders_that_differ_in_many_ways_stand_side_by_side() -> None:
    mixed = [{"a": 1, "b": 5}, {"a": 2, "b": 6}, {"a": 3, "b": 7}]
    (axes,) = overview_chart(swept_sets(mixed)).figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["folder-0", "folder-1", "folder-2"]
