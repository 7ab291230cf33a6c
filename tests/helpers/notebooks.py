"""Execute notebooks without Jupyter; ``python tests/helpers/notebooks.py`` stores their outputs."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _shown(value: object) -> dict[str, Any]:
    """What a notebook shows of the value of a cell's last line, by type of content."""
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    if isinstance(value, Axes):
        picture = io.BytesIO()
        figure: Any = value.figure
        figure.savefig(picture, format="png", dpi=80, metadata={"Software": None})
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return data


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the code cells in one namespace, in ``folder``; return the notebook with their outputs.

    An error of a cell is raised.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    count, cells = 0, []
    with contextlib.chdir(folder), mpl.rc_context({"backend": "agg"}):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                cells.append(cell)
                continue
            count += 1
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            printed, outputs = io.StringIO(), []
            with contextlib.redirect_stdout(printed):
                exec(compile(tree, f"cell {count}", "exec"), names)  # noqa: S102
                expression = None if last is None else ast.Expression(last.value)
                code = None if expression is None else compile(expression, f"cell {count}", "eval")
                value = None if code is None else eval(code, names)
            if printed.getvalue():
                text = _lines(printed.getvalue())
                outputs.append({"name": "stdout", "output_type": "stream", "text": text})
            if value is not None:
                result = {"data": _shown(value), "execution_count": count, "metadata": {}}
                outputs.append({**result, "output_type": "execute_result"})
            cells.append({**cell, "execution_count": count, "outputs": outputs})
    return {**notebook, "cells": cells}


def main() -> None:
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            done = execute(json.loads(path.read_text()), Path(folder))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
