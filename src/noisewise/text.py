"""Text for terminals and files: escaped control characters, and aligned columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["REPR_LENGTH", "align_columns", "array_text", "list_text", "printable", "short_repr"]

REPR_LENGTH = 200
"""The largest length of the repr of an object of the public API."""

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats (bidi), surrogates, separators


def printable(text: str, *, lines: bool = False) -> str:
    r"""Replace invisible characters that have an effect by visible escapes as in JSON.

    These are the C0 and C1 control characters and DEL, which start escape sequences of terminals;
    format characters, which change the writing direction or join words; the line and paragraph
    separators; and lone surrogates, which cannot be encoded in UTF-8. The strings of a JSON text
    keep their meaning.

    Args:
        text: any text.
        lines: keep line ends, for text of several lines.

    Returns:
        The text with escapes.

    Example:
        >>> print(printable("ward\x1b[2J\u202e7"))
        ward\u001b[2J\u202e7
    """
    if text.isprintable():
        return text
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def align_columns(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), *, rule: bool = False
) -> list[str]:
    r"""Align cells in columns that are two spaces apart.

    The cells are not escaped: pass untrusted text through `printable` first.

    Args:
        rows: rows of the table, usually with the headings first; all of the same length.
        right: indexes of the columns that are aligned to the right; the others are aligned to the
            left.
        rule: add a line of dashes below the first row.

    Returns:
        One line for each row, without spaces at its end.

    Raises:
        ValueError: the rows have different lengths.

    Example:
        >>> print("\n".join(align_columns([("client", "N"), ("ward-7", "2400")], right=[1])))
        client     N
        ward-7  2400
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def list_text(names: Sequence[str]) -> str:
    """Return names as a list in a sentence.

    Example:
        >>> list_text(["a"]), list_text(["a", "b"]), list_text(["a", "b", "c"])
        ('a', 'a and b', 'a, b and c')
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def short_repr(thing: object, **facts: object) -> str:
    """Return ``Name(fact=value, ...)`` in one line of at most `REPR_LENGTH` characters.

    Args:
        thing: gives the name: its class.
        facts: what identifies it. Numbers are rounded to 4 digits; facts that are None are left
            out.

    Example:
        >>> short_repr(object(), round=3, accuracy=0.912345, dropped=None, method="WeiAvg")
        "object(round=3, accuracy=0.9123, method='WeiAvg')"
    """
    shown = [f"{name}={_fact(value)}" for name, value in facts.items() if value is not None]
    text = printable(f"{type(thing).__name__}({', '.join(shown)})")
    return text if len(text) <= REPR_LENGTH else f"{text[: REPR_LENGTH - 4]}...)"


def _fact(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


class _Plain(str):
    """Text whose repr has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def array_text(arrays: Any) -> str:
    """Return the type and shape of an array, a tensor, or several of them.

    Example:
        >>> import numpy as np
        >>> array_text({"text": np.zeros((3, 5), np.int32), "age": np.zeros(3)})
        {'text': int32[3, 5], 'age': float64[3]}
    """
    if isinstance(arrays, Mapping):
        parts = ", ".join(f"{name!r}: {array_text(array)}" for name, array in arrays.items())
        return _Plain(f"{{{parts}}}")
    if isinstance(arrays, tuple):
        return _Plain(f"({', '.join(map(array_text, arrays))})")
    kind = str(arrays.dtype).rpartition(".")[2]
    return _Plain(f"{kind}{list(arrays.shape)}")
