"""Escape the text of table cells for CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from noisewise.federation.results import RunResult
from noisewise.text import printable

__all__ = [
    "csv_text",
    "latex_text",
    "markdown_table",
    "markdown_text",
    "printable_run",
]

_FORMULA = tuple("=+-@＝＋－＠")
_MARKDOWN = {"|": "&#124;", "<": "&lt;", "[": r"\["}
_LATEX = {
    **{mark: "\\" + mark for mark in "_%&#${}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    " ± ": r"\,$\pm$\,",
    "^2": "$^2$",
}
_LATEX_MARKS = re.compile(r" ± |\^2|[_%&#${}\\~^]")


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV.

    A text that begins with ``=``, ``+``, ``-`` or ``@`` gets an apostrophe in front, because a
    spreadsheet would treat it as a formula. Numbers are not changed.

    Example:
        >>> print(csv_text([["name", "value"], ["=1+1", -2.5]]), end="")
        name,value
        '=1+1,-2.5
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    return out.getvalue()


def _csv_cell(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def markdown_text(text: str) -> str:
    """Escape text for Markdown, so that it starts no tag, link, column or line."""
    return "".join(_MARKDOWN.get(character, character) for character in printable(text))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)


def latex_text(text: str) -> str:
    """Escape text for LaTeX, so that it contains no command."""
    return _LATEX_MARKS.sub(lambda match: _LATEX[match[0]], printable(text))


def printable_run(result: RunResult) -> RunResult:
    """Return the run with control characters in names escaped; its files may be untrusted."""
    names = [result.method, *result.needs, *result.clients]
    names += [name for record in result.rounds for name in (*record.weights, *record.dropped)]
    if all(name.isprintable() for name in names):
        return result
    cleaned: RunResult = _printable(result)
    return cleaned


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_printable, value))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _printable(getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **changed)
    return value
