"""Notebooks as Markdown pages of the site."""

from __future__ import annotations

from typing import Any

__all__ = ["notebook_markdown"]


def notebook_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook with its stored outputs as Markdown.

    Args:
        notebook: content of an ``.ipynb`` file (nbformat 4).
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        return (
            f'<p><img alt="The plot of the cell above" src="data:image/png;base64,{picture}"></p>'
        )
    if "text/html" in data:
        html = "".join(data["text/html"]).replace("\n", " ")
        return f'<div style="overflow-x: auto">{html}</div>'
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{text.rstrip()}\n```"
