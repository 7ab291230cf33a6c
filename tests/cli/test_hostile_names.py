"""Names with control characters, formulas and markup are escaped in all output."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import Browser
from command import Noisewise
from federation_helpers import small_run
from matplotlib.text import Text
from rich.console import Console

from noisewise import cli, report, text
from noisewise.aggregation.methods import make_method
from noisewise.checks import printable_name
from noisewise.cli.display import TrainingDisplay
from noisewise.data import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.federation import RunResult
from noisewise.paper.grids import Cell, Grid, grid_csv, grid_latex, grid_markdown, grid_text
from noisewise.report import cell_text, chart, tables
from noisewise.report.cell_text import csv_text, latex_text, markdown_table, printable_run
from noisewise.report.comparison_report import write_report
from noisewise.report.explain import explain
from noisewise.report.figures import weights_chart
from noisewise.report.run_sets import RunSet
from noisewise.storage import to_json
from noisewise.text import printable

NAMES = [
    "\x1b[31mred\x1b[2J", "\x9b2J\x84", "left\u202eright\u2066", "two\nlines\r\v", "tab\t\x00\x07",
    "line\u2028para\u2029", "\x7f\xad\u200b\ufeff", "half \ud83d", "tag \U000e0041",
    "$x_{$", r"$\frac", "a$b$c", "=1+1|x", "@SUM(A1)", "-2+3", "<script>alert(1)</script>",
    "[bold]x[/]", "pipe | <b>", "`tick` \\",
]  # fmt: skip
TEMPLATES = Path(report.__file__).parent / "templates"
OWN_SCRIPT = f"<script>\n{(TEMPLATES / 'page.js').read_text().rstrip()}</script>"
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def bad(shown: str, kept: str = "\n") -> list[str]:
    """Characters that act instead of being shown."""
    return [c for c in shown if c not in kept and unicodedata.category(c) in HIDDEN]


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same result with other names everywhere."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, Mapping):
        return {renamed(k, names): renamed(v, names) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(renamed(v, names) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: renamed(getattr(value, f.name), names) for f in fields(value)}
        )
    return value


@pytest.fixture(scope="module")
def results() -> tuple[RunResult, ...]:
    """One run under each of these names; its clients have such names too."""
    run = small_run("RobustHDP", rounds=2)
    ids = dict(zip(run.clients, NAMES, strict=False))
    assert len(ids) > 2
    return tuple(renamed(run, {**ids, "RobustHDP": name}) for name in NAMES)


def test_the_class_of_every_character() -> None:
    for code in range(sys.maxunicode + 1):
        letter = chr(code)
        hidden = unicodedata.category(letter) in HIDDEN
        shown = printable(letter)
        assert (shown != letter) == hidden, hex(code)
        if hidden:
            assert shown.isascii()
            assert json.loads(f'"{shown}"') == letter or 0xD800 <= code < 0xE000
    assert printable("a\nb\r", lines=True) == "a\nb\\u000d"
    assert printable("Zoë 病院 ±²") == "Zoë 病院 ±²"
    assert [printable(printable(name)) for name in NAMES] == [printable(name) for name in NAMES]


def everything_written(results: tuple[RunResult, ...], folder: Path) -> dict[str, str]:
    """All that a report writes as text, from runs with these names."""
    config = f"name = {NAMES[0]!r}{NAMES[2]}"
    write_report([RunSet(results, NAMES[0], config)], folder, title=NAMES[0], notes=[NAMES[2]])
    many = [RunSet((r,), r.method, folder=r.method, settings={NAMES[0]: r.method}) for r in results]
    write_report(many[:2], folder / "sweep", draw_parts=False)
    found = {
        str(path.relative_to(folder)): path.read_bytes().decode()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".html", ".svg", ".md", ".csv", ".json")
    }
    rows = tables.method_rows(results)
    grid = Grid("grid", NAMES[0], tuple(NAMES[:3]),
                {name: {c: Cell(1.0, note=name) for c in NAMES[:3]} for name in NAMES})  # fmt: skip
    found |= {
        "table": tables.as_text(rows),
        "words": explain(results),
        "grid text": grid_text(grid),
        "grid.md": grid_markdown(grid),
        "grid.csv": grid_csv([grid]),
        "grid.tex": grid_latex(grid),
    }
    return found


def faults(found: Mapping[str, str]) -> dict[str, Any]:
    """What is wrong with written texts."""
    wrong: dict[str, Any] = {name: bad(shown) for name, shown in found.items() if bad(shown)}
    for name, shown in found.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(shown)
        if name.endswith(".md"):
            if re.search(r"<\w", shown):
                wrong[name] = "a tag"
            bars = {line.count("|") for line in shown.splitlines() if line.startswith("| ")}
            if len(bars) > 1:
                wrong[name] = bars
        if name.endswith(".csv"):
            starts = [c for row in csv.reader(io.StringIO(shown)) for c in row if c[:1] in "=+-@"]
            starts = [
                cell for cell in starts if cell and not re.fullmatch(r"-?[\d.e-]+|-?inf", cell)
            ]
            if starts:
                wrong[name] = starts
        if name.endswith(".html") and "<script" in shown.replace(OWN_SCRIPT, "").lower():
            wrong[name] = "a script"
    return wrong


def test_no_writer_lets_a_control_character_through(
    results: tuple[RunResult, ...], tmp_path: Path
) -> None:
    found = everything_written(results, tmp_path)
    assert {Path(name).suffix for name in found} >= {".html", ".svg", ".md", ".csv", ".json"}
    assert faults(found) == {}
    page = found["report.html"]
    for name in ("\\u001b[31mred\\u001b[2J", "left\\u202eright\\u2066", "&lt;script&gt;"):
        assert name in page
    assert found["table"].count("\n") == len(NAMES) + 1  # a name is no line of its own
    lines = list(csv.reader(io.StringIO(found["table.csv"])))
    assert [line[0] for line in lines[1:]][12:15] == ["'=1+1|x", "'@SUM(A1)", "'-2+3"]


@pytest.mark.filterwarnings("ignore:Glyph 27")
def test_the_check_notices_writers_that_pass_names_on(
    results: tuple[RunResult, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_HIDDEN", set[str]())
    plain = renamed(results[0], dict(zip(results[0].clients, "abcdefgh", strict=False)))
    some = tuple(replace(plain, method=NAMES[k]) for k in (0, 2, 5, 15))
    rows = tables.method_rows(some)
    assert faults({"table": tables.as_text(rows), "t.csv": tables.as_csv(rows)}).keys() == {
        "table", "t.csv",
    }  # fmt: skip
    picture = weights_chart(some)
    assert picture is not None
    (path,) = chart.save_figure(picture.figure, tmp_path, "weights", ["svg"])
    with pytest.raises(ElementTree.ParseError):  # an escape character is no XML
        faults({"weights.svg": path.read_bytes().decode()})
    monkeypatch.setattr(cell_text, "_FORMULA", ("never",))
    monkeypatch.setattr(cell_text, "_MARKDOWN", {})
    assert "t.csv" in faults({"t.csv": csv_text([["=1+1"]])})
    assert "t.md" in faults({"t.md": markdown_table(["a"], [["<b>"], ["x|y"]])})


def test_a_dollar_begins_no_formula() -> None:
    figure, axes = chart.new_axes()
    axes.set_yticks([0, 1], ["$x_{$", "a$b$c"])
    axes.set_title(r"$\frac")
    axes.set_xscale("log")
    axes.set_xlim(1, 1e4)
    axes.annotate("$$", (10, 0.5))
    chart.fix_layout(figure)
    texts = {t.get_text(): t.get_parse_math() for t in figure.findobj(Text)}
    assert not any(texts[name] for name in ("$x_{$", "a$b$c", r"$\frac", "$$"))
    assert any(name.startswith("$\\mathdefault") and math for name, math in texts.items())
    planted, axes = chart.new_axes()
    axes.set_title("$x_{$")
    with pytest.raises(ValueError, match="x_"):
        planted.draw_without_rendering()


def test_csv_keeps_numbers_and_marks_formulas() -> None:
    row = ["=A1", "+1+1", "-2", "-2.5e-3", "＝1", "-inf", "text", -2.0, None, "", "'quoted", "a=b"]
    shown = next(csv.reader(io.StringIO(csv_text([row]))))
    assert shown == ["'=A1", "'+1+1", "-2", "-2.5e-3", "'＝1", "-inf", "text", "-2.0", "", "",
                     "'quoted", "a=b"]  # fmt: skip


def test_tex_reads_names_as_text() -> None:
    assert latex_text("a_b 5 % & # $x$ {y} ~ ^ \\input") == (
        r"a\_b 5 \% \& \# \$x\$ \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}input"
    )
    assert latex_text("1 ± 2 sigma^2") == r"1\,$\pm$\,2 sigma$^2$"


def test_names_are_refused_where_they_are_made() -> None:
    for name in NAMES[:9]:
        with pytest.raises(InvalidValueError, match="control characters") as raised:
            ClientSpec(name, n_examples=10, batch_size=2, epsilon=1.0, delta=1e-3)
        assert bad(str(raised.value), kept="") == []
        with pytest.raises(InvalidValueError, match=r"method\.name"):
            replace(make_method("WeiAvg"), name=name)
    assert printable_name("id", "Zoë's 病院") == "Zoë's 病院"


def test_a_run_with_plain_names_is_not_copied(results: tuple[RunResult, ...]) -> None:
    plain = small_run("WeiAvg", rounds=1)
    assert printable_run(plain) is plain
    assert bad(repr(to_json(printable_run(results[0]).summary()))) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_the_live_view(
    terminal: bool, results: tuple[RunResult, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    methods = [name for name in NAMES if name.isascii()]
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system=None, width=300)
    with TrainingDisplay(console=console) as display:
        display.start(NAMES[0], len(methods), 2)
        for method in methods:
            for record in results[0].rounds:
                display.on_round(method, 0, record)
    shown = out.getvalue() if terminal else capfd.readouterr().err
    own = re.sub(r"\x1b\[(\?25[lh]|\d*[A-K])|\r", "", shown)  # what rich itself writes
    assert bad(own) == []
    assert "\\u001b[31mred" in own
    if terminal:
        assert "[bold]x[/]" in own


def test_what_the_command_prints_and_logs(
    noisewise: Noisewise, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["report", NAMES[0] + NAMES[2]],
        ["run", NAMES[0], "--set", f"{NAMES[0]}={NAMES[2]}"],
        ["run", Path(__file__).parents[2] / "configs/demo.toml", "--set", f"data.name={NAMES[0]}"],
        ["run", Path(__file__).parents[2] / "configs/demo.toml", "--method", NAMES[2]],
        ["estimate", NAMES[0]],
        ["ledger", "show", NAMES[0]],
        ["flower", "check", NAMES[2]],
        ["data", "get", NAMES[0]],
    ):
        out = noisewise(*words, folder=tmp_path)
        assert out.returncode in (1, 2)
        assert bad(out.stdout + out.stderr) == []
        assert "Traceback" not in out.stderr
    record = logging.LogRecord(NAMES[0], 30, "", 0, "from %s", (NAMES[3],), None)
    shown = cli._OneLine("%(levelname)s %(name)s: %(message)s").format(record)
    assert bad(shown, kept="") == []
    assert shown.endswith("from two\\u000alines\\u000d\\u000b")


@pytest.mark.browser
def test_the_page_in_a_browser_runs_nothing_and_shows_the_names(
    results: tuple[RunResult, ...], tmp_path: Path
) -> None:
    write_report([RunSet(results, NAMES[0])], tmp_path)
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "report.html")
        shown = browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.querySelectorAll('script').length") == 1  # the page's own
        assert browser.evaluate("document.querySelectorAll('b').length") == 0
    assert bad(shown, kept="\n\t") == []
    assert "\\u001b[31mred" in shown
    assert "<script>alert(1)</script>" in shown
