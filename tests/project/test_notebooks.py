"""The notebooks of examples/notebooks run, and the outputs that they show are those of the code."""

from __future__ import annotations

import base64
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from notebooks import NOTEBOOKS, ROOT, execute

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SVG = re.compile(r"<svg.*</svg>", flags=re.DOTALL)


def stored(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [output for cell in cells for output in cell["outputs"]]


def texts(output: dict[str, Any]) -> dict[str, str]:
    """The texts of an output by type; a curve, whose digits may differ, is not part of them."""
    content = output.get("data", {"text/plain": output.get("text", "")})
    return {k: SVG.sub("", "".join(v)) for k, v in content.items() if k.startswith("text")}


def differences(one: str, other: str) -> list[str]:
    """Words that differ, and numbers that differ by more than rounding on another machine."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return [one, other]
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return [f"{a} {b}" for a, b in pairs if float(a) != pytest.approx(float(b), rel=0.02, abs=0.3)]


def test_there_are_two_notebooks() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"first_comparison", "bring_your_own_model"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_computes(path: Path, tmp_path: Path) -> None:
    notebook = stored(path)
    done = execute(notebook, tmp_path)
    shown, computed = outputs(notebook), outputs(done)
    assert len(shown) == len(computed) > 2
    for old, new in zip(shown, computed, strict=True):
        assert set(texts(old)) == set(texts(new))
        assert set(old.get("data", {})) == set(new.get("data", {}))
        for kind, text in texts(new).items():
            assert not differences(texts(old)[kind], text)
    html = "".join(texts(output).get("text/html", "") for output in computed)
    assert "<table>" in html
    curves = "".join("".join(o.get("data", {}).get("text/html", "")) for o in computed)
    assert "<polyline" in curves
    pictures = [o["data"]["image/png"] for o in computed if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")


def test_an_error_in_a_cell_is_raised(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["1 / 0"]}
    with pytest.raises(ZeroDivisionError):
        execute({"cells": [cell]}, tmp_path)


def test_differences_are_found() -> None:
    assert not differences("accuracy 91.0 %", "accuracy 91.1 %")
    assert differences("accuracy 91.0 %", "accuracy 95.1 %")
    assert differences("accuracy 91.0 %", "loss 91.0 %")


def test_the_site_has_a_page_of_each_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    notebook_markdown = importlib.import_module("notebook_pages").notebook_markdown
    for path in NOTEBOOKS:
        page = notebook_markdown(stored(path))
        assert page.startswith("# ")
        assert page.count("```python") == sum(
            cell["cell_type"] == "code" for cell in stored(path)["cells"]
        )
        assert "<table>" in page
        assert "data:image/png;base64," in page
        assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
