"""`noisewise report`: a page of runs that are on disk already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import AsJson, app, say


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_FOLDER...",
            help="Folders of runs, of comparisons or of sweeps; unfinished runs count too.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to. Default: the folder itself; runs/report for several."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about runs, and its figures as PNG, SVG and PDF.

    The page needs no network and shows accuracy, noise and weights against the oracle, budgets
    spent, disclosures, fairness and the config.

    Examples:
      noisewise report runs/demo

      noisewise report runs/monday runs/tuesday --output runs/both
    """
    from noisewise.federation.results import to_json
    from noisewise.report.comparison import write_report
    from noisewise.report.sources import find_runs

    found = find_runs(folders)
    for note in found.notes:
        say(f"noisewise: {note}", err=True)
    home = output or (folders[0] if len(folders) == 1 else Path("runs") / "report")
    heading = title or (f"Report on {folders[0].resolve().name}" if len(folders) == 1 else "Report")
    page, *files = write_report(found.sets, home, title=heading, notes=found.notes)
    runs = [run for one in found.sets for run in one.results]
    counts = {
        status: sum(run.status == status for run in runs)
        for status in ("unfinished", "diverged", "no_updates")
    }
    if as_json:
        told = {"page": str(page), "files": [str(f) for f in files], "runs": len(runs), **counts}
        say(to_json(told))
        return
    words = {"no_updates": "without any update"}
    remarks = [f"{n} {words.get(status, status)}" for status, n in counts.items() if n]
    count = f"{len(runs)} run" + "s" * (len(runs) != 1)
    say(count + (f" ({', '.join(remarks)})" if remarks else "") + f": {page}")
