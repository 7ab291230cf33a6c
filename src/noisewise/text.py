"""Text that can be shown: names from configs, files and other people cannot steer a terminal."""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats (bidi), surrogates, separators


def printable(text: str, *, lines: bool = False) -> str:
    r"""Replace every character that is not shown, but acts, by a visible escape as in JSON.

    These are the controls C0 and C1 with DEL, which begin the escape sequences of terminals; format
    characters, which turn the direction of writing or join words unseen; the line and paragraph
    separators; and lone surrogates, which no file can hold. In a JSON text the escapes keep the
    meaning of its strings.

    Args:
        text: anything.
        lines: keep line ends, for text of several lines.

    Example:
        >>> print(printable("ward\x1b[2J\u202e7"))
        ward\u001b[2J\u202e7
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text)) if not lines else "\n".join(map(printable, text.split("\n")))


def _shown(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) not in _HIDDEN:
        return letter
    code = ord(letter)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
