"""`noisewise reproduce`: the paper's tables and figures, one command each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import (
    PAPER,
    AsJson,
    Set,
    Workers,
    app,
    overrides,
    say,
    words,
)
from noisewise.errors import InvalidValueError
from noisewise.worker_processes import available_cores

if TYPE_CHECKING:
    from noisewise.experiments.comparison import OnRound
    from noisewise.paper.artefact_runs import Column, Overrides


_DAY = 24 * 3600.0


def _names(option: str, text: str | None) -> tuple[str, ...] | None:
    names = words(option, text)
    return None if names is None else tuple(names)


@app.command("reproduce", rich_help_panel=PAPER)
def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(help="Name of a table or figure; default: list all of them.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Runs of each method instead of the paper's 3; --set seed=10 starts at 10.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rounds instead of the paper's 200.")
    ] = None,
    dists: Annotated[
        str | None, typer.Option(help="Columns, comma-separated: Dist1,Dist6 or 20,60.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods instead of the paper's, comma-separated; see `noisewise methods`."
        ),
    ] = None,
    workers: Workers = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the artefact. Default: runs/paper/NAME."),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            help="More formats, comma-separated: csv, tex, png, pdf. JSON, Markdown and SVG are "
            "always written."
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs of all artefacts. Default: runs/paper/cells."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Do not train; use the finished runs.")
    ] = False,
    index: Annotated[
        Path | None, typer.Option(help="Only write a README that lists a folder's artefacts.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also list what takes more than a day.")
    ] = False,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Compute a table or figure of the paper and compare it with the published one.

    Run the same command again to resume interrupted runs. Finished runs are not repeated; tables
    share them.

    Examples:
      noisewise reproduce
      noisewise reproduce noise-table
      noisewise reproduce accuracy-mnist --dists Dist6 --seeds 1
      noisewise reproduce accuracy-mnist --dists Dist6 --collect --formats csv,tex
    """
    if index is not None:
        others: dict[str, object] = {"NAME": name, "--seeds": seeds, "--rounds": rounds}
        others |= {"--dists": dists, "--methods": methods, "--collect": collect or None}
        others |= {"--output": output and str(output), "--set": settings, "--formats": formats}
        for option, value in others.items():
            if value is not None:
                raise InvalidValueError(option, value, "has no effect with --index; leave it out")
        _index(index, as_json)
        return
    if name is None:
        _list(as_json, show_all)
        return
    options = {"--seeds": seeds, "--rounds": rounds, "--dists": dists, "--methods": methods}
    typed = [f"{key} {value}" for key, value in options.items() if value is not None]
    typed += [f"--set {setting}" for setting in settings or []]
    from noisewise.paper import Overrides
    from noisewise.paper.reproduce import STORE

    columns, rows = _names("--dists", dists), _names("--methods", methods)
    changed = Overrides(
        seeds, rounds, columns, rows, workers or available_cores(), overrides(settings)
    )
    folder = output or Path("runs/paper") / name
    kinds = _names("--formats", formats) or ()
    _reproduce(name, changed, folder, store or STORE, collect, kinds, typed, as_json)


def _reproduce(
    name: str,
    changed: Overrides,
    folder: Path,
    store: Path,
    collect: bool,
    formats: Sequence[str],
    typed: list[str],
    as_json: bool,
) -> None:
    """Compute an artefact with a progress display and print it."""
    from noisewise.cli.display import TrainingDisplay
    from noisewise.paper.outcome_files import as_data, as_text, origin_line
    from noisewise.paper.reproduce import reproduce
    from noisewise.storage import to_json

    @contextlib.contextmanager
    def on_column(column: Column) -> Iterator[OnRound]:
        if not as_json:
            rate = f"learning rate {column.rate:g}, " if column.rate is not None else ""
            say(f"{column.name}: {rate}{len(column.jobs)} run(s)", err=True)
        with TrainingDisplay(quiet=as_json) as display:
            display.start("", len(column.jobs), column.config.training.rounds)
            yield display.on_round

    done = reproduce(
        name,
        changed,
        folder=folder,
        store=store,
        collect=collect,
        formats=formats,
        on_column=on_column,
        options=typed,
    )
    if as_json:
        say(to_json(as_data(done.artefact, done.outcome, done.origin), indent=1))
    else:
        say(as_text(done.artefact, done.outcome))
        if done.files:
            say(f"\nMade with: {origin_line(done.origin)}")
            say(f"\n{_file_kinds(done.files)}: {folder}")
        else:
            say("\nNo run succeeded, so nothing was written.")
    if done.outcome.failures:
        raise typer.Exit(1)


def _file_kinds(files: Sequence[Path]) -> str:
    """The kinds of the files that were written, as text."""
    kinds = {".json": "JSON", ".csv": "CSV", ".tex": "LaTeX", ".md": "Markdown", ".svg": "figures"}
    kinds |= {".html": "a page"}
    *most, last = [word for end, word in kinds.items() if any(f.suffix == end for f in files)]
    return f"{', '.join(most)} and {last}" if most else last


def _index(folder: Path, as_json: bool) -> None:
    """Write the index of a folder and print which folders it leaves out."""
    from noisewise.paper.outcome_files import write_index
    from noisewise.storage import to_json

    index = write_index(folder)
    if as_json:
        content = {"index": str(index.path), "artefacts": index.artefacts}
        say(to_json(content | {"left_out": dict(index.left_out)}, indent=1))
        return
    for name, reason in index.left_out.items():
        say(f"left out: {folder / name}: {reason}", err=True)
    say(f"index: {index.path}")


def _list(as_json: bool, show_all: bool) -> None:
    """Print every artefact with the data that it needs and its estimated time, quickest first."""
    from noisewise.paper import artefact_names, load_artefact
    from noisewise.paper.time_estimate import (
        artefact_seconds,
        read_times,
        times_file,
        write_times,
    )
    from noisewise.paper.training_time import duration
    from noisewise.storage import to_json

    artefacts = {name: load_artefact(name) for name in artefact_names()}
    seconds = read_times(artefacts)
    if seconds is None:
        say("timing a few steps of each model ...", err=True)
        seconds = {name: artefact_seconds(artefact) for name, artefact in artefacts.items()}
        write_times(seconds)
    rows = []
    for name, artefact in artefacts.items():
        about = artefact.about
        rows.append(
            {
                "name": name,
                "title": about.title,
                "label": about.label,
                "place": about.place,
                "kind": about.kind,
                "needs": about.needs if about.kind != "elsewhere" else about.notes[0],
                "seconds": seconds[name] / available_cores(),
            }
        )
    if as_json:
        say(to_json(rows, indent=1))
        return
    say(
        f"Times are for all seeds, columns and methods on {available_cores()} core(s) of this "
        "machine, estimated from a few timed steps.\nTo time the steps again, remove "
        f"{times_file()}\n--seeds, --dists, --methods and --rounds shorten the times. Artefacts "
        "share finished runs.\n"
    )
    shown = [row for row in rows if show_all or float(str(row["seconds"])) <= _DAY]
    for row in sorted(shown, key=lambda row: (row["kind"] == "elsewhere", row["seconds"])):
        is_computed = row["kind"] != "elsewhere"
        time = duration(float(str(row["seconds"]))) if is_computed else ""
        say(f"  {row['name']:<24} {row['kind']:<12} {time:>9}  {row['title']}")
        needs = f"needs {row['needs']}" if is_computed else row["needs"]
        say(f"  {'':<24} {row['place']}, {row['label']}; {needs}")
    if len(shown) < len(rows):
        say(f"\n{len(rows) - len(shown)} more take longer than a day: noisewise reproduce --all")
