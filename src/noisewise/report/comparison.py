"""`write_comparison`: everything that a comparison leaves for people, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from noisewise.federation.results import RunResult, to_json
from noisewise.report.explain import explain
from noisewise.report.figures import (
    accuracy_figure,
    budget_figure,
    noise_figure,
    save_figure,
    weights_figure,
)
from noisewise.report.tables import as_csv, as_markdown, method_rows
from noisewise.storage import write_atomic

__all__ = ["write_comparison"]


def write_comparison(results: Sequence[RunResult], folder: Path | str) -> tuple[Path, ...]:
    """Write tables (Markdown, CSV, JSON), the explanation and figures (PNG, SVG).

    Args:
        results: runs of one or more methods over one or more seeds.
        folder: where to.

    Returns:
        The files.
    """
    folder = Path(folder)
    rows = method_rows(results)
    figures = folder / "figures"
    written = [
        *save_figure(accuracy_figure(results), figures, "accuracy"),
        *save_figure(noise_figure(results), figures, "noise"),
        *save_figure(weights_figure(results), figures, "weights"),
    ]
    private = next((result for result in results if result.guarantee is not None), None)
    if private is not None:
        written += save_figure(budget_figure(private), figures, "budgets")
    pictures = "\n".join(
        f"![{path.stem}](figures/{path.name})" for path in written if path.suffix == ".png"
    )
    page = f"# Comparison\n\n{as_markdown(rows)}\n\n{explain(results)}\n\n{pictures}\n"
    texts = {
        "report.md": page,
        "table.csv": as_csv(rows),
        "summary.json": to_json(
            {"rows": [asdict(row) for row in rows], "runs": [r.summary() for r in results]},
            indent=1,
        )
        + "\n",
    }
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
        written.append(folder / name)
    return tuple(written)
