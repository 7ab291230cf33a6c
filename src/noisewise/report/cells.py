"""Names in tables: how a cell is written as CSV, Markdown or LaTeX."""

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
    """Rows as CSV.

    A text that a spreadsheet would compute, because it begins with ``=``, ``+``, ``-`` or ``@``,
    gets an apostrophe in front; numbers stay numbers.
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
    """Text that begins no tag, link or column in Markdown, on one line."""
    return "".join(_MARKDOWN.get(letter, letter) for letter in printable(text))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)


def latex_text(text: str) -> str:
    """Text with everything that TeX would read as a command made visible."""
    return _LATEX_MARKS.sub(lambda found: _LATEX[found[0]], printable(text))


def printable_run(result: RunResult) -> RunResult:
    """The same run with names that can be shown: results may come from files of other people."""
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
