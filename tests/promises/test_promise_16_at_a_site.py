"""Guarantees 1, 5 and 16 of docs/privacy.md at a site.

An added, missing or broken record changes no parameter of the mechanism, nothing in the form of a
reply, and not whether the site answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")

from flwr.app import Message, MetricRecord  # noqa: E402
from observed_site import DECLARED, Client, client, form, observed, rows, table  # noqa: E402

from noisewise.errors import InvalidValueError  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.site.site_file import Site, load_site  # noqa: E402

NEIGHBOURS: dict[str, list[bytes]] = {
    "one less": rows(DECLARED - 1),
    "one more": rows(DECLARED + 1),
    "none": [],
    "many more": rows(3 * DECLARED),
}
BROKEN: dict[str, bytes] = {
    "words": b"x,y,z,u,v", "a quote": b'"oops,0.5,1,1,1', "a quote in a cell": b'0.5,"oops,1,1,1',
    "cells": b"1,2,3,4,5,6,7", "NUL": b"0.1\x00,0.2,1,1,1", "no UTF-8": b"0.1,caf\xe9,1,1,1",
    "a huge cell": b"0.1,1,1," + b"9" * 140_000 + b",1", "a huge quote": b'"' + b"9" * 140_000,
    "a carriage return": b"1,2,3\r,4,1", "two records in one": b"1,2,3,4,1\r1,2,3,4,2",
    "infinite": b"inf,1,1,1,1", "beyond float32": b"1e39,1,1,1,1",
    "largest": b"3e38,-3e38,3e38,0,1",
    "no such class": b"1,2,3,4,3", "empty": b"",
}  # fmt: skip


def check(ask: Client, folder: Path, cases: dict[str, list[bytes]]) -> None:
    whole = observed(table(folder / "whole", rows(DECLARED)), ask)
    plan, asked, _, charged, spent, _ = whole  # type: ignore[misc]
    assert [entry[:2] for entry in charged] == [("training", "sealed"), ("metrics", "sealed")]
    assert len(asked[0]) >= 2 * plan.steps_per_round
    assert spent > 0
    for name, lines in cases.items():
        site = table(folder / name.replace(" ", "-"), lines)
        assert observed(site, ask) == whole, name


def test_one_record_more_or_less_changes_no_parameter_and_no_form(tmp_path: Path) -> None:
    check(client, tmp_path, NEIGHBOURS)


def test_one_broken_record_changes_no_parameter_and_no_form(tmp_path: Path) -> None:
    some = rows(DECLARED)
    check(client, tmp_path, {name: [*some[:9], bad, *some[10:]] for name, bad in BROKEN.items()})


def counts_its_records(site: Path, kind: str) -> Message:
    """Planted: a site whose file follows the true number."""
    true = len(load_site(site).data())
    data = 'file = "records.csv"\nrecords = '
    site.write_text(site.read_text().replace(f"{data}{DECLARED}", f"{data}{true}"))
    return client(site, kind)


def tells_its_records(site: Path, kind: str) -> Message:
    """Planted: Flower's FedAvg asks for ``num-examples``."""
    reply = client(site, kind)
    name = f"metrics-of-{len(load_site(site).data())}"
    reply.content[name] = MetricRecord({"num-examples": 1})
    return reply


def refuses_another_number(site: Path, kind: str) -> Message:
    """Planted: a check of the plan against the true number."""
    read = Site.data

    def strict(self: Site) -> Any:
        data = read(self)
        if len(data) != self.config.data.records:
            raise InvalidValueError("data.records", len(data), "must be the number of records")
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "data", strict)
        return client(site, kind)


@pytest.mark.parametrize("flaw", [counts_its_records, tells_its_records, refuses_another_number])
def test_planted_dependence_on_the_true_number_is_seen(flaw: Client, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="one less"):
        check(flaw, tmp_path, {"one less": NEIGHBOURS["one less"]})


def test_a_missing_file_is_no_record_and_refuses_at_no_cost(tmp_path: Path) -> None:
    site = table(tmp_path, rows(DECLARED))
    (tmp_path / "records.csv").unlink()
    assert client(site, "train").has_error()
    with Ledger.inspect(tmp_path / "site.ledger") as ledger:
        assert ledger.statement().entries == ()


FUNCTIONS = """
import numpy as np

def lists():
    return [[0.5, 1, 2, 3]] * 40 + [[1, "?"], None], [0, 1] * 21

class Records:
    def __len__(self):
        return 50
    def __getitem__(self, number):
        return np.full(4, 1 / number), number % 3

def dataset():
    return Records()

def nothing():
    return [], []
"""


def test_records_of_a_function_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_site_records.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for name, sound in (("lists", 40), ("dataset", 49), ("nothing", 0)):
        site = table(tmp_path / name, [])
        text = site.read_text().replace(
            'file = "records.csv"\nrecords', f'function = "own_site_records:{name}"\nrecords'
        )
        site.write_text(text)
        assert len(load_site(site).data()) == sound
        seen.append(form(client(site, "train")))
    assert seen[0] == seen[1] == seen[2] == form(client(table(tmp_path / "file", []), "train"))
