"""Text for terminals and files: escaped control characters, and aligned columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

__all__ = ["align_columns", "printable"]

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
