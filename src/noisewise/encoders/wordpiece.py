"""`WordPiece`: the tokens of a text, as BERT's uncased models read them.

Rules of BERT (Devlin et al. 2019), as the library `tokenizers` applies them: lower case without
accents, words and punctuation marks apart, then each word as the longest pieces that the vocabulary
has.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

__all__ = ["WordPiece"]

_LONGEST_WORD = 100  # characters; a longer word is unknown
_ASCII_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_REMOVED = frozenset({"Cc", "Cf", "Co"})  # control and format characters, private use
_CJK = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class WordPiece:
    """Splits texts into tokens of a vocabulary.

    Args:
        vocabulary: the pieces in the order of their numbers, with ``[CLS]``, ``[SEP]`` and
            ``[UNK]``; pieces inside a word begin with ``##``.

    Raises:
        KeyError: one of the three special pieces is missing.

    Example:
        >>> pieces = WordPiece(["[UNK]", "[CLS]", "[SEP]", "noise", "##wise", "!"])
        >>> pieces.tokens("Noisewise!", limit=8)
        [1, 3, 4, 5, 2]
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._numbers = {piece: number for number, piece in enumerate(vocabulary)}
        self._start, self._end = self._numbers["[CLS]"], self._numbers["[SEP]"]
        self._unknown = self._numbers["[UNK]"]

    def tokens(self, text: str, limit: int) -> list[int]:
        """Numbers of the first tokens of a text, between ``[CLS]`` and ``[SEP]``.

        Args:
            text: any text.
            limit: largest number of tokens, with the two special ones; at least 2.
        """
        numbers = [self._start]
        for word in _words(text):
            numbers += self._pieces(word)
            if len(numbers) >= limit:
                break
        return [*numbers[: limit - 1], self._end]

    def _pieces(self, word: str) -> list[int]:
        """Numbers of the longest known pieces of a word; ``[UNK]`` if a part is unknown."""
        if len(word) > _LONGEST_WORD:
            return [self._unknown]
        numbers, start = [], 0
        while start < len(word):
            for stop in range(len(word), start, -1):
                piece = word[start:stop] if start == 0 else f"##{word[start:stop]}"
                if piece in self._numbers:
                    numbers.append(self._numbers[piece])
                    start = stop
                    break
            else:
                return [self._unknown]
        return numbers


def _words(text: str) -> Iterator[str]:
    """Words and punctuation marks in lower case, without accents."""
    cleaned = "".join(map(_kept, text))
    plain = unicodedata.normalize("NFD", cleaned)
    for part in plain.split():
        word = ""
        for character in part:
            if unicodedata.category(character) == "Mn":
                continue
            if _is_mark(character):
                if word:
                    yield word
                yield character
                word = ""
            else:
                word += character.lower()
        if word:
            yield word


def _kept(character: str) -> str:
    """The character; nothing for a control character, and with spaces if it is a word by itself."""
    if character in "\t\n\r":
        return " "
    code = ord(character)
    if code == 0xFFFD or unicodedata.category(character) in _REMOVED:
        return ""
    if character.isspace():
        return " "
    if code >= 0x3400 and any(low <= code <= high for low, high in _CJK):
        return f" {character} "
    return character


def _is_mark(character: str) -> bool:
    return character in _ASCII_MARKS or unicodedata.category(character).startswith("P")
