"""A site's invalid records contribute nothing (guarantee 2), and the server cannot detect them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noisewise.errors import InvalidValueError
from noisewise.site.site_records import inputs_and_targets, read_records, usable_records

SHAPE, CLASSES = (2, 3), 4


def arrays(n: int = 12) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, *SHAPE)), rng.integers(0, CLASSES, n)


def spoiled(kind: str, x: Any, y: Any) -> tuple[Any, Any]:
    """One more record, in the middle, that nobody can learn from."""
    worse = np.insert(x, 5, x[5], axis=0), np.insert(y, 5, y[5])
    if kind == "label nan":
        worse = worse[0], worse[1].astype(np.float64)
    values: dict[str, tuple[int, float]] = {
        "nan": (0, np.nan), "inf": (0, np.inf), "beyond float32": (0, 1e300),
        "label high": (1, CLASSES), "label negative": (1, -1), "label nan": (1, np.nan),
        "label huge": (1, 2**62),
    }  # fmt: skip
    part, value = values[kind]
    worse[part].reshape(len(worse[part]), -1)[5, -1] = value
    return worse


KINDS = [
    "nan", "inf", "beyond float32", "label high", "label negative", "label nan", "label huge",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_record_adds_nothing_and_the_sites_log_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = arrays()
    good = usable_records(x, y, SHAPE, CLASSES, "data", images=True)
    assert not caplog.records
    found = usable_records(*spoiled(kind, x, y), SHAPE, CLASSES, "data", images=True)
    assert torch.equal(found.inputs, good.inputs)
    assert torch.equal(found.targets, good.targets)
    assert "1 of 13 records are left out" in caplog.text


def test_half_a_class_is_no_class_and_uint8_is_scaled() -> None:
    x, y = arrays()
    found = usable_records(x, y + 0.5, SHAPE, CLASSES, "data", images=True)
    assert len(found) == 0
    images = usable_records(
        np.full((3, 2, 2), 255, np.uint8), [0, 1, 2], (2, 2), 3, "data", images=True
    )
    assert images.inputs.max() == 1
    assert images.inputs.dtype == torch.float32


def test_uint8_for_fractions_must_be_declared(caplog: pytest.LogCaptureFixture) -> None:
    x, y = np.full((3, 2), 200, np.uint8), [0, 1, 2]
    with pytest.raises(InvalidValueError, match=r"data: inputs = 'uint8': needs data.images: true"):
        usable_records(x, y, (2,), 3, "data")
    assert usable_records(x, y, (2,), 3, "data", images=False).tensor.max() == 200
    mixed = [np.ones(2, np.float32), x[1], [1, 2]]
    found = usable_records(mixed, y, (2,), 3, "data")
    assert found.targets.tolist() == [0, 2]
    assert "1 records of uint8 need data.images" in caplog.text


def test_a_file_of_another_kind_is_still_an_error() -> None:
    x, y = arrays()
    for inputs, targets, words in (
        (x[:, :1], y, "records of shape"),
        (x, y[:-1], "one class for each"),
        (x, y[:, None], "one class for each"),
        (x, list(y[:-1]), "one class for each"),
        (x.astype(complex), y, "of numbers"),
        (x, y.astype("datetime64[s]"), "of numbers"),
        (np.float32(3), y, "of numbers"),
        (iter(x), y, "of numbers"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            usable_records(inputs, targets, SHAPE, CLASSES, "data", images=True)


def test_a_function_returns_a_pair_or_a_dataset() -> None:
    x, y = arrays()
    for pair in ((x, y), [x, y], list(zip([x, y], [1, 2], strict=True))):
        assert len(inputs_and_targets(pair, "data.function")) == 2
    for other in ((x,), [x, y, y], x[0, 0, 0], None, iter([x, y])):
        with pytest.raises(InvalidValueError, match="a pair"):
            inputs_and_targets(other, "data.function")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "must be one of the columns"),
        (b"\na,target\n", "must be one of the columns"),
        (b"a,b\n", "must be one of the columns"),
        (b"target,target\n", "must be one of the columns"),
        (b'a,"target\n', "header in UTF-8"),
        (b"a\xff,target\n", "header in UTF-8"),
        (b"a,target\r1,0\r", "carriage return"),
        ("a,target\n".encode("utf-16"), "header in UTF-8"),
        (b"a,target" + b" " * (1 << 24), "at most"),
    ],
)
def test_the_header_is_public_and_its_faults_are_errors(
    header: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(header + b"1,0\n")
    with pytest.raises(InvalidValueError, match=words) as caught:
        read_records(path, "target", "data.file")
    assert len(str(caught.value)) < 500


def test_bad_lines_of_a_table_add_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    lines = ["a,target,b", "1,0,2", "x,1,2", "1,,2", "1,2", "nan,1,3", "1,-1,2", "3,1,4", "1,0,é"]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    found = read_records(path, "target", "data.file")
    kept = usable_records(found["inputs"], found["targets"], (2,), 2, "data", images=True)
    assert kept.inputs.tolist() == [[1, 2], [3, 4]]
    assert kept.targets.tolist() == [0, 1]


def test_nothing_on_the_wire_tells_of_bad_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even a site without one sound record answers: its answer is noise."""
    pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
    from flower_cases import context, make_site
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    from noisewise.flower.client import make_client_app
    from noisewise.training.models import make_model

    start = ArrayRecord(dict(make_model("softmax", (1, 8, 8), 10, seed=0).named_parameters()))
    told = ConfigRecord({"server-round": 1, "learning-rate": 0.2})
    seen = []
    for name, bad in (("none", 0), ("some", 3), ("all", 60)):
        site = make_site(tmp_path / name, records=60)
        with np.load(site.parent / "records.npz") as file:
            content = dict(file)
        content["inputs"][:bad, 0, 0, 0] = np.nan
        np.savez(site.parent / "records.npz", **content)
        asked = Message(RecordDict({"arrays": start, "config": told}), 7, "train", group_id="1")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            reply = make_client_app()(asked, context(site=str(site)))
        assert ("are left out" in caplog.text) == (bad > 0)
        assert ("no usable record" in caplog.text) == (bad == 60)
        outside = [
            (key, a.dtype, a.shape, a.stype, len(a.data), a.data[:128])
            for key, a in reply.content["delta"].items()
        ]
        assert all(np.isfinite(a.numpy()).all() for a in reply.content["delta"].values())
        seen.append((list(reply.content), outside))
    assert seen[0] == seen[1] == seen[2]
