"""axe-core finds no serious or critical fault in the report and in the page of `watch`.

`.ci/check_site.py --browser` does the same for a page of the documentation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from axe import serious_faults
from browser import Browser
from federation_helpers import small_run

from noisewise.report.comparison_report import write_report
from noisewise.report.run_sets import RunSet
from noisewise.report.watch_server import WatchServer

pytestmark = pytest.mark.browser
OPEN = 'document.querySelectorAll("details").forEach(d => { d.open = true; }); 0'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    methods = ("RobustHDP", "WeiAvg", "FedAvg", "Alone", "Oracle")
    runs = tuple(
        small_run(method, rounds=3, seed=seed, folder=home / "runs" / f"{method}-seed{seed}")
        for seed in (0, 1)
        for method in methods
    )
    one = RunSet(runs, "demo", "seed = 0\n")
    write_report([one], home)
    two = [replace(one, settings={"training.clip_norm": v}, name=f"clip {v}") for v in (0.5, 8.0)]
    write_report(two, home / "sweep", draw_parts=False)
    return home


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", ["report.html", "sweep/report.html"])
def test_the_report_is_accessible(page: str, dark: bool, browser: Browser, folder: Path) -> None:
    browser.open(folder / page, dark=dark)
    browser.evaluate(OPEN)
    assert serious_faults(browser) == []


def test_the_report_is_accessible_on_a_phone(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", width=390, height=800)
    browser.evaluate(OPEN)
    assert serious_faults(browser) == []


def test_the_watch_page_is_accessible(browser: Browser, folder: Path) -> None:
    with WatchServer(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        text = browser.evaluate("document.body.textContent")
        assert "clients trained alone, nothing was sent" in text
        assert serious_faults(browser) == []
        server.shutdown()


def test_planted_faults_are_found(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><html lang="en"><title>t</title><main><h1>t</h1><img src="data:,">'
        '<p style="color:#ccc;background:#fff">pale</p></main></html>'
    )
    browser.open(page)
    assert {fault[1] for fault in serious_faults(browser)} == {"image-alt", "color-contrast"}
