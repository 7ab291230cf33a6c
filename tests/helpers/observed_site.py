"""A site with a CSV file in this process, and all that can be observed of it beside the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_cases import METRICS, context, make_site
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from noisewise.flower.client import make_client_app
from noisewise.privacy.ledger import Ledger
from noisewise.randomness import SecureRandom
from noisewise.site.site_file import load_site
from noisewise.training.models import make_model

__all__ = [
    "DECLARED",
    "Client",
    "client",
    "form",
    "observed",
    "randomness_asked_for",
    "rows",
    "table",
]

DECLARED, FEATURES, CLASSES = 60, 4, 3
HEADER = b"a,b,c,d,target"
Client = Callable[[Path, str], Message]


def rows(n: int) -> list[bytes]:
    values = np.random.default_rng(0).standard_normal((n, FEATURES)).round(3).tolist()
    return [f"{','.join(map(str, row))},{i % CLASSES}".encode() for i, row in enumerate(values)]


def table(folder: Path, lines: list[bytes]) -> Path:
    """A site with these lines as its records, to train on and to test with; a ledger of its own."""
    site = make_site(folder, records=DECLARED)
    text = site.read_text().replace("records.npz", "records.csv")
    text = text.replace("[1, 8, 8]", f"[{FEATURES}]").replace(
        "classes = 10", f"classes = {CLASSES}"
    )
    text = text.replace("[model]", 'held_out = "records.csv"\n\n[model]')
    site.write_text(text + METRICS.format(noise=15.0, records=DECLARED, releases=3))
    (folder / "records.csv").write_bytes(b"\n".join([HEADER, *lines]))
    return site


def client(site: Path, kind: str) -> Message:
    """The deployed client, asked for an update or for a noised accuracy."""
    model = make_model("softmax", (FEATURES,), CLASSES, seed=0)
    config = {"server-round": 1, **({"learning-rate": 0.2} if kind == "train" else {})}
    content = {"arrays": ArrayRecord(dict(model.named_parameters()))}
    message = Message(RecordDict({**content, "config": ConfigRecord(config)}), 7, kind)
    return make_client_app()(message, context(site=str(site)))


def form(reply: Message) -> object:
    """All of a reply but the noised numbers themselves."""
    if reply.has_error():
        return reply.error.code, reply.error.reason
    records: list[object] = []
    for name, record in reply.content.items():
        for key, value in record.items():
            if isinstance(record, ArrayRecord):
                head = value.data[: len(value.data) - 4 * int(np.prod(value.shape))]
                assert np.isfinite(value.numpy()).all()
                records.append((name, key, value.dtype, value.shape, value.stype, head))
            else:
                records.append((name, key, type(value)))
    meta = reply.metadata
    return (
        records,
        meta.message_type,
        meta.src_node_id,
        meta.dst_node_id,
        meta.group_id,
        meta.ttl > 0,
    )


@contextmanager
def randomness_asked_for() -> Iterator[list[object]]:
    """What the client asks the system's generator for; the number of records is not compared."""
    asked: list[object] = []
    real = {name: getattr(SecureRandom, name) for name in ("normal", "poisson_sample")}
    with pytest.MonkeyPatch.context() as patch:

        def normal(self: SecureRandom, step: int, size: int) -> Any:
            asked.append(("normal", step, size))
            return real["normal"](self, step, size)

        def poisson_sample(self: SecureRandom, step: int, size: int, rate: float) -> Any:
            asked.append(("sample", step, rate))
            return real["poisson_sample"](self, step, size, rate)

        patch.setattr(SecureRandom, "normal", normal)
        patch.setattr(SecureRandom, "poisson_sample", poisson_sample)
        yield asked


def observed(site: Path, ask: Client) -> object:
    """Plan, randomness asked for, form of the replies, and what the ledger charged."""
    forms, asked = [], []
    for kind in ("train", "evaluate"):
        with randomness_asked_for() as calls:
            forms.append(form(ask(site, kind)))
        asked.append(calls)
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        statement = ledger.statement()
    charged = [
        (e.purpose, e.state, e.instruction, e.sample_rate, e.noise_multiplier, e.steps)
        for e in statement.entries
    ]
    sizes = [e.reply_size for e in statement.entries if e.purpose == "training"]
    return load_site(site).plan, asked, forms, charged, statement.spent, sizes
