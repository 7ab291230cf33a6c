"""Sequences of different lengths as records of one declared length, and texts as token ids.

The length comes from the user. It is never that of the longest sequence: one private record would
then decide the shape of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError

__all__ = ["next_tokens", "pad_sequences", "tokenise"]


def pad_sequences(
    sequences: Sequence[ArrayLike], length: int, *, fill: int = 0, field: str = "sequences"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut or fill up sequences of whole numbers to one length.

    Args:
        sequences: of any lengths, at least 1.
        length: L, written down by the user.
        fill: the number after the end of a shorter sequence.
        field: for errors.

    Returns:
        Numbers [N, L], and a mask [N, L] with 1 where there is a number of the sequence.

    Raises:
        InvalidValueError: a sequence is empty or has no whole numbers.

    Example:
        >>> ids, mask = pad_sequences([[5, 6, 7], [8]], length=2)
        >>> ids.tolist(), mask.tolist()
        ([[5, 6], [8, 0]], [[1, 1], [1, 0]])
    """
    shape = (len(sequences), positive_int("length", length))
    ids, mask = np.full(shape, fill, np.int64), np.zeros(shape, np.int64)
    for number, sequence in enumerate(sequences):
        row = np.asarray(sequence)
        where = f"{field}, record {number}"
        if row.ndim != 1 or row.size == 0:
            allowed = "must be a sequence with at least one number: remove the record"
            raise InvalidValueError(where, f"shape {list(row.shape)}", allowed)
        if row.dtype.kind not in "biu":
            raise InvalidValueError(where, row.dtype, "must be whole numbers")
        tokens = row[:length]
        ids[number, : len(tokens)], mask[number, : len(tokens)] = tokens, 1
    return ids, mask


def next_tokens(
    tokens: ArrayLike, length: int, *, stride: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut one long sequence of tokens into records for a language model.

    The target of a place is the token after it. An incomplete rest is left out.

    Args:
        tokens: [M] whole numbers.
        length: L, positions in a record.
        stride: distance between two records; by default L, so that they do not overlap.

    Returns:
        Inputs [N, L] and targets [N, L].

    Raises:
        InvalidValueError: there are fewer than L + 1 tokens.

    Example:
        >>> inputs, targets = next_tokens([1, 2, 3, 4, 5], length=2)
        >>> inputs.tolist(), targets.tolist()
        ([[1, 2], [3, 4]], [[2, 3], [4, 5]])
    """
    row = np.asarray(tokens)
    step = positive_int("stride", positive_int("length", length) if stride is None else stride)
    if row.ndim != 1 or row.dtype.kind not in "biu" or len(row) <= length:
        form = f"{row.dtype}{list(row.shape)}"
        raise InvalidValueError("tokens", form, f"must be more than {length} whole numbers")
    starts = np.arange(0, len(row) - length, step)
    positions = starts[:, None] + np.arange(length)
    return row[positions].astype(np.int64), row[positions + 1].astype(np.int64)


def tokenise(
    texts: Sequence[str], tokenizer: Callable[..., Mapping[str, Any]], length: int
) -> dict[str, NDArray[np.int64]]:
    """Token ids of texts by a Hugging Face tokenizer, all of one declared length.

    Args:
        texts: at least one.
        tokenizer: called as Hugging Face's are, with ``padding="max_length"``.
        length: L, tokens of a record.

    Returns:
        The tokenizer's arrays [N, L] by name, such as ``input_ids`` and ``attention_mask``.

    Raises:
        InvalidValueError: a text has no token, or the tokenizer returns another length.
    """
    positive_int("length", length)
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
    arrays = {str(name): np.asarray(values) for name, values in encoded.items()}
    for name, values in arrays.items():
        if values.shape != (len(texts), length) or values.dtype.kind not in "biu":
            form = f"{values.dtype}{list(values.shape)}"
            allowed = f"must be whole numbers [{len(texts)}, {length}]"
            raise InvalidValueError(f"tokenizer: {name}", form, allowed)
    mask = arrays.get("attention_mask")
    if mask is not None and not mask.any(axis=1).all():
        number = int(np.argmin(mask.any(axis=1)))
        allowed = "must have at least one token: remove the record"
        raise InvalidValueError(f"texts, record {number}", texts[number][:40], allowed)
    return {name: values.astype(np.int64) for name, values in arrays.items()}
