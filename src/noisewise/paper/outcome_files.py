"""An outcome as files: JSON, Markdown and SVG; CSV, LaTeX, PNG and PDF on request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.paper.artefacts import Artefact, artefact_names
from noisewise.paper.grids import grid_csv, grid_latex, grid_markdown, grid_text
from noisewise.paper.outcome import Outcome, grid_data, verdicts
from noisewise.paper.training_time import duration
from noisewise.report.cell_text import markdown_text
from noisewise.report.chart import save_figure
from noisewise.storage import to_json, write_atomic
from noisewise.text import printable

__all__ = [
    "FORMATS",
    "Index",
    "as_data",
    "as_text",
    "check_formats",
    "origin_line",
    "write_index",
    "write_outcome",
]

FORMATS = ("csv", "tex", "png", "pdf")
"""What `write_outcome` writes on request, besides JSON, Markdown and SVG."""
_TABLES = {"csv": "figures.csv", "tex": "table.tex"}


def check_formats(formats: Sequence[str]) -> None:
    """Reject unknown formats.

    Raises:
        InvalidValueError: if a format is not one of `FORMATS`.
    """
    for name in formats:
        if name not in FORMATS:
            raise InvalidValueError("--formats", name, f"must be among {', '.join(FORMATS)}")


def as_data(artefact: Artefact, outcome: Outcome, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``result.json``; the outcome's own data are at the top level."""
    return {
        **outcome.data,
        "artefact": artefact.name,
        "title": artefact.about.title,
        "label": artefact.about.label,
        "origin": dict(origin),
        "verdicts": verdicts(outcome),
        "grids": {grid.name: grid_data(grid) for grid in outcome.grids},
        "claims": [
            {
                "text": claim.text,
                "holds": None if outcome.not_comparable else claim.holds,
                "measured": claim.measured,
            }
            for claim in outcome.claims
        ],
        "notes": list(outcome.notes),
        "failures": dict(outcome.failures),
    }


def as_text(artefact: Artefact, outcome: Outcome) -> str:
    """Return the outcome as text for a terminal."""
    parts = [f"{artefact.about.title}  ({artefact.about.label})"]
    parts += [grid_text(grid) for grid in outcome.grids]
    parts += ["\n".join(verdicts(outcome))]
    parts += [f"Note: {note}" for note in outcome.notes]
    parts += [f"Failed: {name}: {error}" for name, error in outcome.failures.items()]
    return "\n\n".join(part for part in parts if part)


def origin_line(origin: Mapping[str, Any]) -> str:
    """Return one line about the origin of the figures."""
    machine = origin["machine"]
    facts = [
        f"commit {origin['commit']}" if origin["commit"] else f"noisewise {origin['noisewise']}",
        origin["date"],
        f"seeds {', '.join(map(str, origin['seeds']))}" if origin.get("seeds") else "no randomness",
        f"accountant {origin['accountant']}",
        *_times(origin),
        f"{origin['workers']} worker(s) on {machine['cores']} cores of {machine['processor']}",
    ]
    return "; ".join(facts) + "."


def _times(origin: Mapping[str, Any]) -> list[str]:
    """The time of the last call and, if the artefact needs training, the time of the training.

    Every call computes closed forms anew, so for them the time of the call is enough.
    """
    call = f"{origin['wall_seconds']:.0f} s"
    if not origin.get("seeds"):
        return [call]
    facts = [f"{call} for the last call"]
    if compute := origin.get("compute"):
        seconds, trained_runs = compute["seconds"], f"{compute['count']} {compute['of']}"
        if compute["complete"]:
            facts.append(f"{trained_runs} trained in {duration(seconds)}, added up")
        elif seconds >= 1:
            facts.append(f"{trained_runs} trained in at least {duration(seconds)}, added up")
        else:
            facts.append(f"training time of {trained_runs} not recorded")
        code = ", ".join(compute["code"])
        if code != (origin["commit"] or f"noisewise {origin['noisewise']}"):
            facts.append(f"code of the training: {code}")
    return facts


@dataclass(frozen=True)
class Index:
    """The index of a folder of artefacts.

    Attributes:
        path: the file that was written.
        artefacts: the names of the artefacts' folders, in the paper's order.
        left_out: folders whose ``result.json`` does not belong to an artefact, with the reason.
    """

    path: Path
    artefacts: tuple[str, ...]
    left_out: Mapping[str, str]


_INDEX_TITLE = "# What was run"


def write_index(folder: Path) -> Index:
    """Write a README that lists the artefacts in a folder with their verdicts.

    Raises:
        InvalidValueError: if there are no artefacts, or if the folder has a README that is not an
            index.
    """
    sections: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for path in sorted(folder.glob("*/result.json")):
        name = path.parent.name
        try:
            sections[name] = _section(name, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            left_out[name] = f"not a readable artefact ({type(error).__name__}: {error})"
    if not sections:
        allowed = "must hold artefacts that `noisewise reproduce NAME --output FOLDER/NAME` wrote"
        raise InvalidValueError("--index", str(folder), allowed)
    path = folder / "README.md"
    if path.exists() and not path.read_bytes().startswith(_INDEX_TITLE.encode()):
        allowed = f"is not an index (`{_INDEX_TITLE}`) and is not overwritten; move it first"
        raise InvalidValueError("--index", str(path), allowed)
    lines = [_INDEX_TITLE, "", "Written by `noisewise reproduce --index`. See"]
    lines += ["docs/reproduction.md for what agrees with the paper, what does not, and why.", ""]
    names = sorted(sections, key=_position)
    lines += [line for name in names for line in sections[name]]
    write_atomic(path, ("\n".join(lines).rstrip() + "\n").encode())
    return Index(path, tuple(names), left_out)


def _section(name: str, content: Any) -> list[str]:
    """The lines of the index about one artefact.

    Raises:
        KeyError: if the content lacks a field of an artefact.
        TypeError: if the content is not that of an artefact.
    """
    if not isinstance(content, dict) or "artefact" not in content:
        raise TypeError("not written by `noisewise reproduce`")
    return [
        *(f"## [{name}]({name}/README.md)", "", f"{content['title']}.", ""),
        *(origin_line(content["origin"]), ""),
        *(*(f"- {sentence}" for sentence in content["verdicts"]), ""),
    ]


def _position(name: str) -> int:
    """The position of an artefact in the paper; copies under other names come last."""
    names = artefact_names()
    return names.index(name) if name in names else len(names)


def write_outcome(
    folder: Path,
    artefact: Artefact,
    outcome: Outcome,
    origin: Mapping[str, Any],
    formats: Sequence[str] = (),
) -> tuple[Path, ...]:
    """Write ``result.json``, ``README.md`` and the figures as SVG.

    Files of an earlier call in formats that are not requested now are removed: they would show
    other results.

    Args:
        folder: where to write.
        artefact: the description of the artefact.
        outcome: its tables, claims and figures.
        origin: commit, date, seeds, accountant, machine and times.
        formats: further formats, of `FORMATS`: ``figures.csv``, ``table.tex``, figures as PNG, PDF.

    Returns:
        The files.
    """
    about = artefact.about
    kinds = ["svg", *(kind for kind in ("png", "pdf") if kind in formats)]
    pictures: list[str] = []
    written: list[Path] = []
    for name, figure in outcome.figures.items():
        written += save_figure(figure, folder, name, kinds)
        pictures.append(f"![{name}]({name}.svg)")
    options = "" if not origin["options"] else " " + printable(" ".join(origin["options"]))
    page = [
        f"# {about.title}",
        f"The paper's `{about.label}`. {origin_line(origin)}",
        f"Made by `noisewise reproduce {artefact.name}{options}`.",
        "\n".join(f"- {sentence}" for sentence in verdicts(outcome)),
        *(grid_markdown(grid) for grid in outcome.grids),
        *pictures,
        "\n".join(f"- {note}" for note in outcome.notes),
        "\n".join(
            f"- failed: {markdown_text(f'{name}: {error}')}"
            for name, error in outcome.failures.items()
        ),
    ]
    text = "\n\n".join(part for part in page if part) + "\n"
    files = {
        "result.json": to_json(as_data(artefact, outcome, origin), indent=1) + "\n",
        "README.md": re.sub(r"[ \t]+\n", "\n", text),
    }
    if outcome.grids and "csv" in formats:
        files[_TABLES["csv"]] = grid_csv(outcome.grids)
    if outcome.grids and "tex" in formats:
        files[_TABLES["tex"]] = "\n".join(grid_latex(grid) for grid in outcome.grids)
    for name, content in files.items():
        write_atomic(folder / name, content.encode())
    written = [*(folder / name for name in files), *written]
    stale = [folder / name for name in _TABLES.values()]
    stale += [folder / f"{name}.{kind}" for name in outcome.figures for kind in ("png", "pdf")]
    for path in stale:
        if path not in written:
            path.unlink(missing_ok=True)
    return tuple(written)
