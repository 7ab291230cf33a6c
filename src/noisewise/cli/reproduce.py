"""`noisewise reproduce`: the paper's tables and figures, one command each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import AsJson, Set, Workers, app, cores, overrides, say, words
from noisewise.errors import InvalidValueError

if TYPE_CHECKING:
    from noisewise.experiments.comparison import OnProgress
    from noisewise.experiments.paper.cells import Column, Wishes


def _names(option: str, text: str | None) -> tuple[str, ...] | None:
    found = words(option, text)
    return None if found is None else tuple(found)


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(help="A table or figure; without it, all are listed.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs of each method, instead of the paper's 3; --set seed=10 begins at 10."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds, instead of the paper's 200.")
    ] = None,
    dists: Annotated[
        str | None, typer.Option(help="Comma-separated columns: Dist1,Dist6 or 20,60.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Comma-separated, instead of the paper's; any of `noisewise methods`."),
    ] = None,
    workers: Workers = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the artefact. Default: runs/paper/NAME."),
    ] = None,
    store: Annotated[Path, typer.Option(help="Folder for runs, shared by all artefacts.")] = Path(
        "runs/paper/cells"
    ),
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing: show the runs finished so far.")
    ] = False,
    index: Annotated[
        Path | None, typer.Option(help="Only write a README for the artefacts in this folder.")
    ] = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Compute a table or figure of the paper and put it beside the published one.

    Runs that were interrupted go on where they stopped; finished ones are not run again, also if
    another table needs them.

    Examples:
      noisewise reproduce
      noisewise reproduce noise-table
      noisewise reproduce accuracy-mnist --dists Dist6 --seeds 1
      noisewise reproduce accuracy-mnist --dists Dist6 --collect
    """
    if index is not None:
        chosen: dict[str, object] = {"NAME": name, "--seeds": seeds, "--rounds": rounds}
        chosen |= {"--dists": dists, "--methods": methods, "--collect": collect or None}
        chosen |= {"--output": output and str(output), "--set": settings}
        for option, value in chosen.items():
            if value is not None:
                raise InvalidValueError(option, value, "plays no part with --index; leave it out")
        _index(index, as_json)
        return
    if name is None:
        _list(as_json)
        return
    given = {"--seeds": seeds, "--rounds": rounds, "--dists": dists, "--methods": methods}
    typed = [f"{key} {value}" for key, value in given.items() if value is not None]
    typed += [f"--set {setting}" for setting in settings or []]
    from noisewise.experiments.paper import Wishes

    columns, rows = _names("--dists", dists), _names("--methods", methods)
    wishes = Wishes(seeds, rounds, columns, rows, workers or cores(), overrides(settings))
    _reproduce(name, wishes, output or Path("runs/paper") / name, store, collect, typed, as_json)


def _reproduce(
    name: str,
    wishes: Wishes,
    folder: Path,
    store: Path,
    collect: bool,
    typed: list[str],
    as_json: bool,
) -> None:
    """Compute an artefact, showing progress, and print it."""
    from noisewise.display import comparison_display
    from noisewise.experiments.paper.reproduce import reproduce
    from noisewise.experiments.paper.writing import as_data, as_text, origin_line
    from noisewise.federation.results import to_json

    @contextlib.contextmanager
    def on_column(column: Column) -> Iterator[OnProgress]:
        if not as_json:
            what = f"learning rate {column.rate:g}, " if column.rate is not None else ""
            say(f"{column.name}: {what}{len(column.jobs)} run(s)", err=True)
        with comparison_display(
            column.jobs, column.config.training.rounds, quiet=as_json
        ) as display:
            yield display.on_round

    done = reproduce(
        name,
        wishes,
        folder=folder,
        store=store,
        collect=collect,
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
            say("\nNo run ended well, so nothing was written.")
    if done.outcome.failures:
        raise typer.Exit(1)


def _file_kinds(files: Sequence[Path]) -> str:
    """What was written, in words."""
    kinds = {".json": "JSON", ".csv": "CSV", ".tex": "LaTeX", ".md": "Markdown", ".png": "figures"}
    kinds |= {".html": "a page"}
    *most, last = [word for end, word in kinds.items() if any(f.suffix == end for f in files)]
    return f"{', '.join(most)} and {last}" if most else last


def _index(folder: Path, as_json: bool) -> None:
    """Write the list of the artefacts in a folder and say what is not in it."""
    from noisewise.experiments.paper.writing import write_index
    from noisewise.federation.results import to_json

    index = write_index(folder)
    if as_json:
        content = {"index": str(index.path), "artefacts": index.artefacts}
        say(to_json(content | {"left_out": dict(index.left_out)}, indent=1))
        return
    for name, reason in index.left_out.items():
        say(f"left out: {folder / name}: {reason}", err=True)
    say(f"index: {index.path}")


def _list(as_json: bool) -> None:
    """Every artefact with what it needs and how long it takes here."""
    from noisewise.experiments.paper import artefact_names, load_artefact
    from noisewise.experiments.paper.cost import artefact_seconds
    from noisewise.experiments.paper.effort import duration
    from noisewise.federation.results import to_json

    say("timing a few steps of each model ...", err=True)
    rows = []
    for name in artefact_names():
        artefact = load_artefact(name)
        about = artefact.about
        seconds = artefact_seconds(artefact) / cores()
        rows.append(
            {
                "name": name,
                "title": about.title,
                "label": about.label,
                "place": about.place,
                "kind": about.kind,
                "needs": about.needs if about.kind != "elsewhere" else about.notes[0],
                "seconds": seconds,
            }
        )
    if as_json:
        say(to_json(rows, indent=1))
        return
    say(
        f"Times are for all seeds, columns and methods on {cores()} core(s) of this machine, "
        "scaled from a few timed steps;\n--seeds, --dists, --methods and --rounds make them "
        "shorter, and finished runs are shared.\n"
    )
    for place in ("main", "appendix"):
        say("Main part" if place == "main" else "\nAppendix")
        for row in (row for row in rows if row["place"] == place):
            time = "" if row["kind"] == "elsewhere" else duration(float(str(row["seconds"])))
            say(f"  {row['name']:<24} {row['kind']:<12} {time:>9}  {row['title']}")
            say(f"  {'':<24} {row['label']}; needs {row['needs']}"
                       if row["kind"] != "elsewhere"
                       else f"  {'':<24} {row['label']}; {row['needs']}")  # fmt: skip
