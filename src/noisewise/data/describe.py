"""Cards of datasets, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from noisewise.checks import known_name
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.columns import ColumnCoder, NumberInput
from noisewise.data.datasets import list_datasets
from noisewise.data.federations import FEDERATIONS, FederationInfo

__all__ = ["describe_dataset"]

_WIDTH = 100
_LABEL = 10  # columns of the terminal for the name of a field


def describe_dataset(name: str) -> str:
    """The card of a dataset: source, licence, clients, target, columns and known leaks.

    Args:
        name: one of `dataset_names`.

    Raises:
        InvalidValueError: the name is unknown.
    """
    rows = {row.name: row for row in list_datasets()}
    name = known_name("dataset", name, rows)
    row = rows[name]
    if name in FEDERATIONS:
        lines = list(_card(FEDERATIONS[name]))
    else:
        shape = " x ".join(map(str, row.shape))
        test = f" and {row.n_test:,} to test" if row.n_test else ""
        lines = [f"{name}: {row.n_train:,} images to train{test}", ""]
        lines += _field("shape", f"{shape}, {row.n_classes} classes")
        lines += _field("client", "not recorded; data.partition splits the images")
        if name in CATALOGUE:
            scaling = CATALOGUE[name].scaling
            lines += _field("scaling", f"mean {scaling.mean}, deviation {scaling.std}")
    lines += _field("fetched", "; or ".join(row.sources))
    lines += _field("state", row.state)
    return "\n".join(lines)


def _card(info: FederationInfo) -> Iterator[str]:
    card = info.card
    yield f"{info.name}: {info.title}"
    yield ""
    yield from _field("records", f"{info.n_records:,} of {info.n_clients} clients")
    for field in ("record", "client", "target"):
        yield from _field(field, getattr(card, field))
    yield from _field("classes", ", ".join(info.classes))
    if info.coder is not None:
        yield from _columns(info.coder)
    yield from _items("leaks", card.leaks)
    yield from _items("notes", card.notes)
    yield from _field("source", card.source)
    yield from _field("licence", card.licence)
    for name, digest in info.files.items():
        yield from _field("file", f"{name}, SHA-256 {digest}")


def _columns(coder: ColumnCoder) -> Iterator[str]:
    yield from _field("columns", f"{coder.width} inputs of {len(coder.inputs)} columns")
    for column in coder.inputs:
        if isinstance(column, NumberInput):
            description = f"number in [{column.low:g}, {column.high:g}]"
        else:
            description = f"category, one of {len(column.categories)}"
        if column.missing is not None:
            own = column.missing == "own"
            description += "; missing cells " + (
                "have an input" if own else f"count as {column.missing}"
            )
        yield from _field("", f"- {column.name}: {description}")
    if coder.dropped:
        yield from _field("", f"- not used: {', '.join(coder.dropped)}")


def _items(label: str, items: Sequence[str]) -> Iterator[str]:
    for number, item in enumerate(items):
        yield from _field("" if number else label, f"- {item}")


def _field(label: str, text: str) -> list[str]:
    indent = " " * _LABEL
    first = f"{label:<{_LABEL}}"
    later = indent + "  " if text.startswith("- ") else indent
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
