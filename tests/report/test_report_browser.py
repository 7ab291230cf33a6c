"""The page in headless Chromium: complete, without errors, readable in dark mode and on phones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from federation_helpers import small_run

from noisewise.federation import RunResult
from noisewise.report.comparison_report import write_report
from noisewise.report.run_sets import RunSet

pytestmark = pytest.mark.browser
CHARTS = [
    "accuracy", "paired", "epsilon", "noise", "weights", "estimates", "budgets", "fairness",
    "confusion", "loss", "joining",
]  # fmt: skip
PART = {"part": "local training", "seconds": 1.5, "seconds_per_round": 0.5, "share": 1.0}
TIMING = {"rounds": 3, "seconds": 1.5, "parts": [PART]}

# Every element with words of its own: its contrast with what lies behind it (WCAG 2).
CONTRAST = """
(() => {
  const light = c => { const f = c.map(v => { v /= 255;
      return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
    return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const behind = e => { for (; e; e = e.parentElement) {
      const c = parts(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c.slice(0, 3); }
    return null; };
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  const found = [];
  for (const e of document.body.querySelectorAll("*")) {
    if (!e.getClientRects().length || e.tagName === "title") continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e);
    const ink = parts(e instanceof SVGElement ? style.fill : style.color);
    const back = behind(e);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), e.textContent.trim().slice(0, 40)]);
  }
  return found;
})()
"""
# Height in pixels of the letters of every word in a chart.
LETTERS = """
[...document.querySelectorAll("figure svg")].flatMap(svg =>
  [...svg.querySelectorAll("text")].map(t => parseFloat(getComputedStyle(t).fontSize)
    * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width))
"""
# Words of a chart that stick out of its frame.
OUTSIDE = """
[...document.querySelectorAll("figure")].flatMap(f => { const box = f.getBoundingClientRect();
  return [...f.querySelectorAll("svg text")].filter(t => { const b = t.getBoundingClientRect();
    return b.left < box.left || b.right > box.right; }).map(t => t.textContent); })
"""


@pytest.fixture(scope="module")
def runs() -> tuple[RunResult, ...]:
    methods = ("RobustHDP", "WeiAvg", "DPFedAvg", "MinEpsilon", "FedAvg", "Alone", "Oracle")
    found = [small_run(m, rounds=3, seed=s, learning_rate=0.5) for s in (0, 1) for m in methods]
    return (*found[:-1], replace(found[-1], status="unfinished"))


@pytest.fixture(scope="module")
def pages(runs: tuple[RunResult, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of one comparison, and that of a sweep of two."""
    home = tmp_path_factory.mktemp("pages")
    config = 'seed = 0\n[model]\nname = "' + "long-name-" * 30 + '"\n'
    one = RunSet(runs, "demo", config, {"RobustHDP, seed 0": TIMING})
    two = [replace(one, settings={"training.clip_norm": v}, name=f"clip {v}") for v in (0.5, 8.0)]
    return {
        "comparison": write_report([one], home / "one", notes=["a/run is left out: damaged"])[0],
        "sweep": write_report(two, home / "two", draw_parts=False)[0],
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


VIEWS: list[dict[str, Any]] = [
    {"width": 1280, "height": 900, "dark": False},
    {"width": 1280, "height": 900, "dark": True},
    {"width": 360, "height": 740, "dark": False},
    {"width": 360, "height": 740, "dark": True},
]


@pytest.mark.parametrize("page", ["comparison", "sweep"])
@pytest.mark.parametrize("view", VIEWS, ids=lambda v: f"{v['width']}{'dark' if v['dark'] else ''}")
def test_the_page(
    page: str, view: dict[str, Any], browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    browser.open(pages[page], **view)
    assert browser.evaluate("document.documentElement.scrollWidth") <= view["width"]
    contrast = browser.evaluate(CONTRAST)  # opens all that can be opened
    assert len(contrast) > 200
    assert min(contrast)[0] >= 4.5, sorted(contrast)[:5]
    assert browser.evaluate("document.documentElement.scrollWidth") <= view["width"]
    letters = browser.evaluate(LETTERS)
    assert min(letters) >= 7
    assert max(letters) <= 20
    assert browser.evaluate(OUTSIDE) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != view["dark"]
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.complaints() == []
    assert browser.requests() == [pages[page].resolve().as_uri()]


def test_every_chart_is_there_and_drawn(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["comparison"])
    drawn = browser.evaluate(
        """[...document.querySelectorAll("figure")].map(f => {
          const box = f.querySelector("svg").getBoundingClientRect();
          return [f.className.split(" ")[1], box.width, box.height,
                  f.querySelectorAll("svg path").length, f.querySelectorAll("use title").length,
                  f.querySelectorAll("table tbody tr").length]; })"""
    )
    assert [name for name, *_ in drawn] == CHARTS
    for name, width, height, paths, tips, rows in drawn:
        assert width > 400, name
        assert height > 150, name
        assert paths > 5, name
        assert tips >= 4 or name == "confusion", name  # its cells show their values
        assert rows >= 3 or name == "joining", name  # its table is beside it
    words = browser.evaluate("document.body.innerText")
    for part in (
        "Result",
        "Does joining pay?",
        "What is disclosed to the server",
        "Where the time went",
        "Config",
        "How to cite",
    ):
        assert part in words
    assert "1 of 14 runs not finished" in words
    assert "a/run is left out" in words


def test_a_pointer_finds_the_exact_value(
    browser: Browser, pages: dict[str, Path], runs: tuple[RunResult, ...]
) -> None:
    browser.open(pages["comparison"])
    tip = browser.evaluate(
        """(() => { const marks = [...document.querySelectorAll(".accuracy use")].filter(u =>
            u.querySelector("title")?.textContent.startsWith("round 3"));
          marks[0].scrollIntoView({block: "center"});
          const box = marks[0].getBoundingClientRect();
          const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
          return hit.querySelector("title")?.textContent; })()"""
    )
    finals = [100 * r.accuracy for r in runs if r.method == "RobustHDP"]
    assert tip.splitlines()[0] == "round 3"
    assert f"RobustHDP: {sum(finals) / 2:.1f} (" in tip
    assert len(tip.splitlines()) == 8  # all methods


# Words of table headings that are broken in two.
BROKEN = """
[...document.querySelectorAll("th.whole")].flatMap(th => {
  const text = th.firstChild; let at = 0;
  return th.textContent.split(/(\\s+)/).filter(word => {
    const range = document.createRange();
    range.setStart(text, at); range.setEnd(text, at += word.length);
    return word.trim() && new Set([...range.getClientRects()].map(b => Math.round(b.top))).size > 1;
  }); })
"""


def test_headings_are_whole_in_print(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["comparison"], width=700)
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.evaluate("document.querySelectorAll('th.whole').length") > 30
    assert browser.evaluate(BROKEN) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= 700
    browser.evaluate(
        "document.querySelectorAll('th.whole').forEach(h => {"
        " h.style = 'overflow-wrap:anywhere;max-width:12px;display:inline-block'; })"
    )
    assert browser.evaluate(BROKEN) != []  # the check can fail
    browser.call("Emulation.setEmulatedMedia", media="")


def test_the_gain_of_each_client_is_in_view(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["comparison"], width=1400)
    sizes = "(() => { const t = document.querySelector('.beside .scroll');"
    sizes += " return [t.scrollWidth, t.clientWidth]; })()"
    needed, shown = browser.evaluate(sizes)
    assert needed <= shown


def test_a_method_and_its_marks_are_in_one_line_on_a_phone(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["sweep"], width=390)
    tops = browser.evaluate(
        """[...document.querySelectorAll("#overview ~ .scroll td:has(.mark)")].map(cell => {
          const name = document.createRange();
          name.selectNodeContents(cell);
          return [cell.querySelector(".mark").getBoundingClientRect().bottom,
                  Math.max(...[...name.getClientRects()].map(b => b.top))]; })"""
    )
    assert len(tops) > 4
    assert all(last < bottom for bottom, last in tops)


def test_the_checks_can_fail(browser: Browser, tmp_path: Path) -> None:
    """A page with each fault is found out."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<body style='background:#fff'><p style='color:#bbb'>pale</p>"
        "<div style='width:900px'>wide</div><script>console.error('x'); missing()</script>"
        "<img src='data:nonsense'>"
    )
    browser.open(page, width=360)
    assert browser.evaluate("document.documentElement.scrollWidth") > 360
    assert min(browser.evaluate(CONTRAST))[0] < 4.5
    assert len(browser.complaints()) >= 2
