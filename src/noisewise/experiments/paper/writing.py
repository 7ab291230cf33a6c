"""An outcome as files: JSON, CSV, LaTeX, Markdown and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisewise.errors import InvalidValueError
from noisewise.experiments.paper.effort import duration
from noisewise.experiments.paper.outcome import Outcome, grid_data, verdicts
from noisewise.experiments.paper.registry import Artefact, artefact_names
from noisewise.federation.results import to_json
from noisewise.report.cells import markdown_text
from noisewise.report.chart import save_figure
from noisewise.report.grids import grid_csv, grid_latex, grid_markdown, grid_text
from noisewise.storage import write_atomic
from noisewise.text import printable

__all__ = ["Index", "as_data", "as_text", "origin_line", "write_index", "write_outcome"]


def as_data(artefact: Artefact, outcome: Outcome, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Everything for machines; an outcome's own data stand at the top."""
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
    """Everything for a terminal."""
    parts = [f"{artefact.about.title}  ({artefact.about.label})"]
    parts += [grid_text(grid) for grid in outcome.grids]
    parts += ["\n".join(verdicts(outcome))]
    parts += [f"Note: {note}" for note in outcome.notes]
    parts += [f"Failed: {name}: {fault}" for name, fault in outcome.failures.items()]
    return "\n\n".join(part for part in parts if part)


def origin_line(origin: Mapping[str, Any]) -> str:
    """One line about where the figures come from."""
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
    """How long the last call took and, where something is trained, how long the training.

    Closed forms are computed by every call, so its time is all there is to say.
    """
    call = f"{origin['wall_seconds']:.0f} s"
    if not origin.get("seeds"):
        return [call]
    facts = [f"{call} for the last call"]
    if compute := origin.get("compute"):
        seconds, what = compute["seconds"], f"{compute['count']} {compute['of']}"
        if compute["complete"]:
            facts.append(f"{what} trained in {duration(seconds)}, added up")
        elif seconds >= 1:
            facts.append(f"{what} trained in at least {duration(seconds)}, added up")
        else:
            facts.append(f"{what} trained in a time that was not recorded")
        code = ", ".join(compute["code"])
        if code != (origin["commit"] or f"noisewise {origin['noisewise']}"):
            facts.append(f"code of the training: {code}")
    return facts


@dataclass(frozen=True)
class Index:
    """A list of artefacts, written.

    Attributes:
        path: of the file.
        artefacts: names of their folders, in the paper's order.
        left_out: folders with a ``result.json`` that is no artefact's, each with the reason.
    """

    path: Path
    artefacts: tuple[str, ...]
    left_out: Mapping[str, str]


_INDEX_TITLE = "# What was run"


def write_index(folder: Path) -> Index:
    """A README that lists the artefacts in a folder with their verdicts, in the paper's order.

    Raises:
        InvalidValueError: if there are none, or if the folder has a README of somebody else's.
    """
    sections: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for path in sorted(folder.glob("*/result.json")):
        name = path.parent.name
        try:
            sections[name] = _section(name, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            left_out[name] = f"no artefact that can be read ({type(error).__name__}: {error})"
    if not sections:
        allowed = "must hold artefacts that `noisewise reproduce NAME --output FOLDER/NAME` wrote"
        raise InvalidValueError("--index", str(folder), allowed)
    path = folder / "README.md"
    if path.exists() and not path.read_bytes().startswith(_INDEX_TITLE.encode()):
        allowed = f"is not an index (`{_INDEX_TITLE}`), so it is kept; move it away first"
        raise InvalidValueError("--index", str(path), allowed)
    lines = [_INDEX_TITLE, "", "Written by `noisewise reproduce --index`. See"]
    lines += ["docs/reproduction.md for what agrees with the paper, what does not, and why.", ""]
    names = sorted(sections, key=_place)
    lines += [line for name in names for line in sections[name]]
    write_atomic(path, ("\n".join(lines).rstrip() + "\n").encode())
    return Index(path, tuple(names), left_out)


def _section(name: str, content: Any) -> list[str]:
    """What the index says about an artefact.

    Raises:
        KeyError: or a TypeError, if the content is not that of an artefact.
    """
    if not isinstance(content, dict) or "artefact" not in content:
        raise TypeError("not written by `noisewise reproduce`")
    return [
        *(f"## [{name}]({name}/README.md)", "", f"{content['title']}.", ""),
        *(origin_line(content["origin"]), ""),
        *(*(f"- {sentence}" for sentence in content["verdicts"]), ""),
    ]


def _place(name: str) -> int:
    """Where an artefact stands in the paper; copies under other names come last."""
    names = artefact_names()
    return names.index(name) if name in names else len(names)


def write_outcome(
    folder: Path, artefact: Artefact, outcome: Outcome, origin: Mapping[str, Any]
) -> tuple[Path, ...]:
    """Write ``result.json``, ``figures.csv``, ``table.tex``, ``README.md`` and the figures.

    Returns:
        The files.
    """
    about = artefact.about
    pictures, written = [], []
    for name, figure in outcome.figures.items():
        png, *others = save_figure(figure, folder, name)
        pictures.append(f"![{name}]({png.name})")
        written += [png, *others]
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
            f"- failed: {markdown_text(f'{name}: {fault}')}"
            for name, fault in outcome.failures.items()
        ),
    ]
    text = "\n\n".join(part for part in page if part) + "\n"
    files = {
        "result.json": to_json(as_data(artefact, outcome, origin), indent=1) + "\n",
        "README.md": re.sub(r"[ \t]+\n", "\n", text),
    }
    if outcome.grids:
        files["figures.csv"] = grid_csv(outcome.grids)
        files["table.tex"] = "\n".join(grid_latex(grid) for grid in outcome.grids)
    for name, content in files.items():
        write_atomic(folder / name, content.encode())
    return (*(folder / name for name in files), *written)
