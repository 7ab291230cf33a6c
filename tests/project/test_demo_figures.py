"""The figures of the README and of docs/demo.md are those of the demo, as it runs today."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import noisewise as nw

ROOT = Path(__file__).parents[2]
README_ROWS = {
    "NoiseWise (ours)": "NoiseWise",
    "Robust-HDP (ICML 2024)": "RobustHDP",
    "BudgetAvg": "BudgetAvg",
    "DPFedAvg": "DPFedAvg",
    "Alone: each hospital trains by itself": "Alone",
}
DISCLOSED = {"epsilon": "epsilon", "n_examples": "number of records"}


@pytest.fixture
def demo() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "studies" / "results" / "demo.json").read_text())
    return found


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first line begins with the heading."""
    text = (ROOT / page).read_text()
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def shown(figures: dict[str, Any]) -> str:
    """Mean and standard error over the seeds, as the pages write them."""
    percent = [100 * value for value in figures["accuracy"].values()]
    error = statistics.stdev(percent) / math.sqrt(len(percent))
    return f"{statistics.mean(percent):.1f} ± {error:.1f} %"


def test_the_readme_shows_five_methods_of_the_demo(demo: dict[str, Any]) -> None:
    table = rows("README.md", "| method | accuracy")
    assert [row[0] for row in table] == list(README_ROWS)
    for label, accuracy, disclosed in table:
        figures = demo["methods"][README_ROWS[label]]
        assert accuracy == shown(figures)
        names = ", ".join(DISCLOSED[need] for need in figures["needs"])
        assert disclosed == (names or "nothing")


def test_the_page_of_the_demo_shows_every_method(demo: dict[str, Any]) -> None:
    table = rows("docs/demo.md", "| method | accuracy ± standard error | noise")
    assert {row[0] for row in table} == set(demo["methods"])
    for name, accuracy, noise, signal, _, disclosed in table:
        figures = demo["methods"][name]
        assert accuracy == shown(figures)
        assert disclosed == (", ".join(figures["needs"]) or "nothing")
        if "noise_ratio" in figures:
            mean = statistics.mean(figures["noise_ratio"].values())
            value = 0.0 if noise == "no noise" else float(noise)
            assert value == pytest.approx(mean, rel=2e-3), name
        if "signal_share" in figures and signal:
            assert float(signal) == pytest.approx(
                statistics.mean(figures["signal_share"].values()), abs=0.006
            )


def test_sentences_about_the_demo_have_its_figures(demo: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    sentence = text[text.index("**The result in one sentence:**") :].split("\n\n")[0]
    found = re.findall(r"(\d+\.\d) %", sentence)
    means = [
        100 * statistics.mean(demo["methods"][name]["accuracy"].values())
        for name in ("NoiseWise", "DPFedAvg", "Alone")
    ]
    assert found == [f"{mean:.1f}" for mean in means]


@pytest.mark.slow
def test_a_run_of_the_demo_gives_its_figure_again(demo: dict[str, Any], tmp_path: Path) -> None:
    result = nw.run(ROOT / "configs" / "digits_head.toml", method="NoiseWise", folder=tmp_path)
    expected = demo["methods"]["NoiseWise"]["accuracy"]["0"]
    assert result.accuracy == pytest.approx(expected, abs=0.01)  # other processors round otherwise
