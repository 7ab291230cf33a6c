"""Datasets of texts with real clients, for use with an encoder."""

from __future__ import annotations

import email
import email.header
import email.message
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisewise.checks import known_name, positive_int
from noisewise.data.archives import read_members
from noisewise.data.datasets import get_dataset
from noisewise.data.federations import FEDERATIONS
from noisewise.data.file_sets import cached_files
from noisewise.data.groups import check_groups, name_groups
from noisewise.data.progress import Progress, silent
from noisewise.errors import InvalidValueError
from noisewise.text import short_repr

__all__ = ["TEXT_LENGTH", "TextDataset", "load_texts", "mail_text", "text_records"]

TEXT_LENGTH = 2048
"""Bytes of a text's record by default: 256 tokens of an e-mail need fewer, in 99.9 of 100 cases."""


@dataclass(frozen=True, eq=False, repr=False)
class TextDataset:
    """Texts with classes and real clients. `text_records` makes records of them.

    Args:
        name: as given to `load_texts`.
        texts: one for each record.
        targets: [N], int64, classes from 0.
        n_classes: number of classes.
        groups: [N], int64, the number of each record's client.
        group_names: names of the clients, in the order of their numbers.
    """

    name: str
    texts: tuple[str, ...]
    targets: NDArray[np.int64]
    n_classes: int
    groups: NDArray[np.int64]
    group_names: tuple[str, ...]

    def __repr__(self) -> str:
        """Its name and sizes, not the texts."""
        return short_repr(
            self, name=self.name, texts=len(self.texts), n_classes=self.n_classes,
            clients=len(self.group_names),
        )  # fmt: skip

    def __post_init__(self) -> None:
        n = len(self.texts)
        if self.targets.dtype != np.int64 or self.targets.shape != (n,):
            form = f"{self.targets.dtype}{list(self.targets.shape)}"
            raise InvalidValueError("targets", form, f"must be int64 of shape [{n}]")
        if n and not (self.targets.min() >= 0 and self.targets.max() < self.n_classes):
            span = (int(self.targets.min()), int(self.targets.max()))
            raise InvalidValueError("targets", span, f"must lie in 0..{self.n_classes - 1}")
        check_groups(self.groups, self.group_names, n)


def load_texts(
    name: str, *, folder: str | Path | None = None, progress: Progress = silent
) -> TextDataset:
    """Load a dataset of texts by name; download it first if it is not in the cache.

    Args:
        name: ``"spam"``.
        folder: folder with files that you downloaded; None uses the environment variable
            ``NOISEWISE_DATA``, if it is set.
        progress: called during downloads.

    Returns:
        The dataset.

    Raises:
        InvalidValueError: no dataset of texts has this name.
        SourceError: no source has the dataset; the message lists what was tried and what to do.
    """
    names = [info.name for info in FEDERATIONS.values() if info.reader is None]
    name = known_name("dataset", name, names)
    get_dataset(name, folder, progress)
    info = FEDERATIONS[name]
    (archive,) = cached_files(info).values()
    texts, owners = _read_mails(archive)
    groups, group_names = name_groups(owners)
    spam = [int(owner.startswith("spam")) for owner in owners]
    targets = np.array(spam, dtype=np.int64)
    return TextDataset(name, texts, targets, len(info.classes), groups, group_names)


def text_records(texts: Sequence[str], length: int = TEXT_LENGTH) -> NDArray[np.uint8]:
    """Texts as records of one length: the bytes of their UTF-8 form.

    A longer text is cut, which may leave a part of a character at the end; a shorter one is filled
    up with zeros. An encoder such as `noisewise.encoders.minilm` makes features of such records.

    Args:
        texts: any texts.
        length: L, bytes of a record.

    Returns:
        [N, L], uint8.

    Example:
        >>> text_records(["Hi!", "Hello"], length=4).tolist()
        [[72, 105, 33, 0], [72, 101, 108, 108]]
    """
    records = np.zeros((len(texts), positive_int("text_length", length)), np.uint8)
    for record, text in zip(records, texts, strict=True):
        content = text.encode("utf-8", "replace")[:length]
        record[: len(content)] = np.frombuffer(content, np.uint8)
    return records


def _read_mails(archive: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and collections of all e-mails ``data/COLLECTION/NUMBER.txt``, ordered by path."""
    mails = {}
    for path, content in read_members(archive):
        if path.suffix == ".txt" and path.parts[-3:-2] == ("data",):
            mails[path] = mail_text(content.read())
    paths = sorted(mails)
    return tuple(mails[path] for path in paths), tuple(path.parts[-2] for path in paths)


def mail_text(raw: bytes) -> str:
    r"""Subject and text of an e-mail, without its other headers; empty lines separate the parts.

    Plain text is preferred to HTML, whose tags are removed. Bytes that cannot be decoded become
    replacement characters. Every input gives a text.

    Example:
        >>> mail_text(b"From: a@example.org\nSubject: Hello\n\nHow are you?\n")
        'Hello\n\nHow are you?'
    """
    message = email.message_from_bytes(raw)
    parts = [part for part in message.walk() if part.get_content_maintype() == "text"]
    plain = [part for part in parts if part.get_content_subtype() == "plain"]
    subject = " ".join(_decoded_subject(message).split())
    bodies = [_body(part) for part in plain or parts]
    return "\n\n".join(piece for piece in (subject, *bodies) if piece)


def _decoded_subject(message: email.message.Message) -> str:
    subject = str(message.get("Subject", ""))
    try:
        return str(email.header.make_header(email.header.decode_header(subject)))
    except (ValueError, LookupError):  # an unknown charset, or bytes that do not fit it
        return subject


def _body(part: email.message.Message) -> str:
    payload = part.get_payload(decode=True)
    content = payload if isinstance(payload, bytes) else b""
    try:
        text = content.decode(part.get_content_charset("utf-8"), errors="replace")
    except (ValueError, LookupError):  # an unknown charset
        text = content.decode("latin-1")
    if part.get_content_subtype() == "html":
        text = re.sub(r"<[^>]*>", " ", text)
        text = " ".join(text.split())
    return text.strip()
