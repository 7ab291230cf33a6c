"""Guarantees 16 and 17 of docs/privacy.md at a site that protects persons.

Neighbouring datasets (without a person, or with another record of one) change no parameter of the
mechanism, nothing in the form of a reply, and not whether the site answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")

from flwr.app import Message  # noqa: E402
from observed_site import HEADER, Client, client, observed, rows, table  # noqa: E402
from site_cases import protect_persons  # noqa: E402

from noisewise.errors import InvalidValueError  # noqa: E402
from noisewise.site.site_file import Site, load_site  # noqa: E402
from noisewise.training import TensorData  # noqa: E402

PERSONS, MOST = 20, 3


def lines(counts: list[int]) -> list[bytes]:
    """Records of persons: so many of each, in turn; the person is in the first column."""
    owners = [person for turn in range(max(counts)) for person, n in enumerate(counts) if n > turn]
    return [b"p%d,%s" % pair for pair in zip(owners, rows(len(owners)), strict=True)]


def site_of(folder: Path, records: list[bytes]) -> Path:
    """A site with these records that protects persons; it trains and tests on all of them."""
    site = table(folder, records)
    (folder / "records.csv").write_bytes(b"\n".join([b"who," + HEADER, *records]))
    site.write_text(site.read_text().replace("batch_size = 30", "batch_size = 10"))
    protect_persons(site, PERSONS, MOST)
    return site


COUNTS = [3] * PERSONS
WHOLE = lines(COUNTS)
NEIGHBOURS: dict[str, list[bytes]] = {
    "one person less": lines(COUNTS[:-1]),
    "one more": lines([*COUNTS, 1]),
    "one record less": WHOLE[1:],
    "one record more": [*WHOLE, b"p3," + rows(1)[0]],
    "a person with 200 records": lines([200, *COUNTS[1:]]),
    "one person alone": lines([60]),
    "nobody": [],
}
BROKEN: dict[str, bytes] = {
    "blank": b",1,2,3,4,1", "blanks": b"  ,1,2,3,4,1", "continuous": b"3.25,1,2,3,4,1",
    "missing": b"NaN,1,2,3,4,1", "no cell": b"1,2,3,4,1", "two cells": b"p1,p2,1,2,3,4,1",
    "no UTF-8": b"caf\xe9,1,2,3,4,1", "NUL": b"p\x00,1,2,3,4,1", "a quote": b'"p1,1,2,3,4,1',
    "a huge name": b"p" * 140_000 + b",1,2,3,4,1", "another person": b"p1,1,2,3,4,1",
    "a new person": b"nobody else,1,2,3,4,1", "infinite": b"p2,inf,2,3,4,1",
    "words": b"p2,x,2,3,4,1", "no such class": b"p2,1,2,3,4,3", "largest": b"p2,3e38,-3e38,0,0,1",
    "empty": b"",
}  # fmt: skip


def check(ask: Client, folder: Path, cases: dict[str, list[bytes]]) -> None:
    whole = observed(site_of(folder / "whole", WHOLE), ask)
    plan, _, _, charged, _, _ = whole  # type: ignore[misc]
    assert (plan.unit, plan.max_records) == ("person", MOST)
    assert [entry[:2] for entry in charged] == [("training", "sealed"), ("metrics", "sealed")]
    for name, records in cases.items():
        site = site_of(folder / name.replace(" ", "-"), records)
        assert observed(site, ask) == whole, name


def test_neighbours_change_no_parameter_and_no_form(tmp_path: Path) -> None:
    check(client, tmp_path, NEIGHBOURS)


def test_one_broken_record_changes_no_parameter_and_no_form(tmp_path: Path) -> None:
    cases = {name: [*WHOLE[:9], bad, *WHOLE[10:]] for name, bad in BROKEN.items()}
    check(client, tmp_path, cases)


def refuses_large_persons(site: Path, kind: str) -> Message:
    """Planted: a person with more records than allowed is an error."""
    read = Site.data

    def strict(self: Site) -> TensorData:
        data = read(self)
        assert data.persons is not None
        if np.diff(data.persons.starts).max() > MOST:
            raise InvalidValueError("data.person", "too many records", f"must be {MOST} or fewer")
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "data", strict)
        return client(site, kind)


def counts_its_persons(site: Path, kind: str) -> Message:
    """Planted: a site whose file follows the true number."""
    found = load_site(site).data().count("person")
    declared = f"\npersons = {PERSONS}\n"
    site.write_text(site.read_text().replace(declared, f"\npersons = {max(found, 10)}\n"))
    return client(site, kind)


@pytest.mark.parametrize(
    ("flaw", "name"),
    [(refuses_large_persons, "a person with 200 records"), (counts_its_persons, "one person less")],
)
def test_planted_dependence_on_one_person_is_seen(flaw: Client, name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=name):
        check(flaw, tmp_path, {name: NEIGHBOURS[name]})
