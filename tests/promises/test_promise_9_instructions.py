"""Guarantee 9 of docs/privacy.md: a server cannot set privacy parameters.

Also guarantee 1 at the client of a real federation.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import context, make_site  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402

from noisewise.errors import BudgetSpentError  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402
from noisewise.flower.parameter_records import layout_of, read_theta  # noqa: E402
from noisewise.flower.wire import NOT_TAKING_PART  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.site.site_file import load_site  # noqa: E402
from noisewise.training.models import make_model  # noqa: E402

GOOD = {"server-round": 1, "learning-rate": 0.2}


def model_arrays(seed: int = 0) -> ArrayRecord:
    return ArrayRecord(dict(make_model("softmax", (1, 8, 8), 10, seed=seed).named_parameters()))


def message(config: dict[str, Any], arrays: ArrayRecord | None = None, **more: Any) -> Message:
    content = RecordDict({"arrays": arrays or model_arrays(), "config": ConfigRecord(config)})
    for name, record in more.items():
        content[name] = record
    return Message(content, 7, "train", group_id="1")


def ask(site: Path, asked: Message, run_config: dict[str, Any] | None = None) -> Message:
    where = context(site=str(site))
    where.run_config = run_config or {}
    return make_client_app()(asked, where)


def charges(site: Path) -> list[tuple[float, float, int]]:
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        entries = ledger.statement().entries
    return [(e.sample_rate, e.noise_multiplier, e.steps) for e in entries]


def refused(reply: Message) -> bool:
    return reply.has_error() and reply.error.reason == NOT_TAKING_PART


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site", records=60, rounds=50)


def test_a_sound_instruction_gets_noised_arrays_and_nothing_else(site: Path) -> None:
    reply = ask(site, message(GOOD))
    assert not reply.has_error()
    assert list(reply.content) == ["delta"]
    assert list(reply.content["delta"]) == ["1.weight", "1.bias"]
    plan = load_site(site).plan
    assert charges(site) == [(plan.sample_rate, plan.noise_multiplier, plan.steps_per_round)]
    delta = read_theta(reply.content["delta"], layout_of(model_arrays()))
    expected = 0.2 * plan.noise_std / plan.expected_batch * np.sqrt(plan.steps_per_round)
    assert float(delta.std()) == pytest.approx(expected, rel=0.25)  # signal is small beside it


def test_the_same_instruction_again_gets_the_same_bytes_free_of_charge(site: Path) -> None:
    first, second = ask(site, message(GOOD)), ask(site, message(GOOD))
    for name, array in first.content["delta"].items():
        assert second.content["delta"][name].data == array.data
    assert len(charges(site)) == 1
    other = ask(site, message(GOOD | {"server-round": 2}))
    assert other.content["delta"]["1.weight"].data != first.content["delta"]["1.weight"].data
    assert len(charges(site)) == 2


def with_value(value: float) -> ArrayRecord:
    arrays = model_arrays()
    bias = arrays["1.bias"].numpy().copy()
    bias[0] = value
    return ArrayRecord({**arrays, "1.bias": Array(bias)})


@pytest.mark.parametrize(
    "asked",
    [
        message(GOOD | {"learning-rate": 100.0}),
        message(GOOD | {"learning-rate": 1e-9}),
        message(GOOD | {"learning-rate": float("nan")}),
        message(GOOD | {"learning-rate": 1}),
        message(GOOD | {"learning-rate": "0.2"}),
        message(GOOD | {"server-round": 0}),
        message(GOOD | {"server-round": 10**9}),
        message(GOOD | {"server-round": True}),
        message(GOOD | {"noise_multiplier": 0.0}),
        message(GOOD | {"clip-norm": 1e9}),
        message(GOOD | {"epsilon": 1e9}),
        message(GOOD | {"steps": 1}),
        message(GOOD | {"features": "identity"}),
        message(GOOD | {"weights": "encoder.pt", "sha256": "0" * 64}),
        message({"learning-rate": 0.2}),
        message({}),
        message(GOOD, extra=ConfigRecord({"epsilon": 1e9})),
        message(GOOD, metrics=MetricRecord({"x": 1.0})),
        message(GOOD, more=model_arrays()),
        message(GOOD, with_value(np.nan)),
        message(GOOD, ArrayRecord(dict(list(model_arrays().items())[:1]))),
        message(GOOD, ArrayRecord({"1.weight": Array(np.zeros((10, 65), np.float32))})),
        Message(RecordDict(), 7, "train"),
        Message(RecordDict({"arrays": ConfigRecord({}), "config": model_arrays()}), 7, "train"),
        message(GOOD, ArrayRecord({k: Array(np.zeros((2, 2))) for k in model_arrays()})),
        Message(message(GOOD).content, 7, "evaluate"),
        Message(message(GOOD).content, 7, "query"),
    ],
)
def test_what_is_not_on_the_list_is_refused_and_costs_nothing(asked: Message, site: Path) -> None:
    assert refused(ask(site, asked))
    assert charges(site) == []


VALUES = st.one_of(st.integers(-(2**62), 2**62), st.floats(), st.text(max_size=8), st.booleans())
KEYS = st.one_of(
    st.sampled_from(
        ["server-round", "learning-rate", "noise_multiplier", "z", "clip_norm", "delta", "epsilon",
         "sample_rate", "steps", "local_epochs", "batch_size", "site", "seed", "planned_rounds",
         "features", "weights", "sha256"]
    ),
    st.text(max_size=6),
)  # fmt: skip


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    told=st.dictionaries(KEYS, VALUES, max_size=4),
    run=st.dictionaries(KEYS, VALUES, max_size=4),
    sound=st.booleans(),
)
def test_no_instruction_and_no_run_config_changes_the_plan(
    site: Path, told: dict[str, Any], run: dict[str, Any], sound: bool
) -> None:
    """Whatever is asked, every entry of the ledger is exactly one round of the site's own plan."""
    plan = load_site(site).plan
    before = len(charges(site))
    reply = ask(site, message(GOOD | {"server-round": before + 1} if sound else told), run)
    found = charges(site)
    one = (plan.sample_rate, plan.noise_multiplier, plan.steps_per_round)
    assert set(found) <= {one}
    assert len(found) - before == (0 if refused(reply) else 1)
    if sound:
        assert not refused(reply) or before >= 50  # the run's config never reaches the site


def test_a_spent_budget_a_missing_or_foreign_ledger_and_broken_files_are_refusals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spent = make_site(tmp_path / "spent", records=60, rounds=1)
    assert not ask(spent, message(GOOD)).has_error()
    cases = {"the budget does not allow": spent}
    cases["site.ledger"] = make_site(tmp_path / "missing", records=60, ledger=False)
    foreign = make_site(tmp_path / "foreign", records=60)
    foreign.write_text(foreign.read_text().replace("digits-0", "digits-1"))
    cases["foreign"] = foreign
    corrupt = make_site(tmp_path / "corrupt", records=60)
    (corrupt.parent / "site.ledger").write_bytes(b"not a database")
    cases["corrupt"] = corrupt
    norm = make_site(tmp_path / "norm", records=60)
    norm.write_text(norm.read_text().replace('"softmax"', '"flower_cases:with_batch_norm"'))
    cases["BatchNorm"] = norm
    lost = make_site(tmp_path / "lost", records=60)
    (lost.parent / "records.npz").unlink()
    cases["records.npz"] = lost
    wrong = make_site(tmp_path / "wrong", records=60)
    wrong.write_text(wrong.read_text().replace("epsilon = 8.0", "epsilon = inf"))
    cases["budget.epsilon"] = wrong
    cases["nowhere.toml"] = tmp_path / "nowhere.toml"
    for words, place in cases.items():
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            reply = ask(place, message(GOOD | {"server-round": 2}))
        assert refused(reply), words
        assert reply.error.code == 451
        assert words in caplog.text


def test_no_site_in_the_node_config_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    reply = make_client_app()(message(GOOD), context())
    assert refused(reply)
    assert "--node-config" in caplog.text


def test_one_record_less_changes_no_byte_outside_the_values(tmp_path: Path) -> None:
    """Promise 1: lengths, names, types, shapes and what the ledger charges are the same."""
    found = []
    for name in ("all", "less"):
        site = make_site(tmp_path / name, records=60)
        if name == "less":
            with np.load(site.parent / "records.npz") as file:
                kept = {key: file[key][:-1] for key in ("inputs", "targets")}
            np.savez(site.parent / "records.npz", **kept)
        reply = ask(site, message(GOOD))
        outside = [
            (key, a.dtype, a.shape, a.stype, len(a.data), a.data[:128])
            for key, a in reply.content["delta"].items()
        ]
        found.append((list(reply.content), outside, charges(site), reply.metadata.ttl > 0))
    assert found[0] == found[1]


def test_a_site_may_divide_its_update_by_its_steps(tmp_path: Path) -> None:
    parts = []
    for normalise in (False, True):
        site = make_site(
            tmp_path / str(normalise), records=60, batch=6, epochs=10, normalise=normalise
        )
        reply = ask(site, message(GOOD))
        parts.append(read_theta(reply.content["delta"], layout_of(model_arrays())))
    assert load_site(site).plan.steps_per_round == 100
    ratio = float(torch.linalg.norm(parts[0]) / torch.linalg.norm(parts[1]))
    assert 70 < ratio < 140


def test_a_site_answers_so_many_rounds_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The count is a limit beside the budget, which here would last for 50 rounds."""
    site = make_site(tmp_path, records=60, rounds=50)
    site.write_text(site.read_text() + "rounds = 2\n")
    for number in (1, 2):
        assert not refused(ask(site, message(GOOD | {"server-round": number})))
    assert refused(ask(site, message(GOOD | {"server-round": 3})))
    assert "all 2 rounds of this plan that the site allows are charged" in caplog.text
    assert len(charges(site)) == 2
    assert not refused(ask(site, message(GOOD | {"server-round": 2})))  # the same bytes again


def test_without_a_limit_of_its_own_the_planned_rounds_are_the_limit(tmp_path: Path) -> None:
    site = make_site(tmp_path, records=60, rounds=3)
    plan = load_site(site).plan
    with load_site(site).open_ledger() as ledger:
        for number in (1, 2):  # of three
            ledger.reserve(f"{number:064x}", plan)
        with pytest.raises(BudgetSpentError, match="all 2 rounds"):
            ledger.reserve(f"{9:064x}", plan, at_most=2)
        assert ledger.remaining(plan, at_most=3) == 1
        assert ledger.remaining(plan, at_most=2) == 0
    assert load_site(site).rounds_allowed == 3
    assert not refused(ask(site, message(GOOD)))
    assert refused(ask(site, message(GOOD | {"server-round": 2})))


def test_clients_that_ask_at_once_get_no_more_rounds_than_the_limit(tmp_path: Path) -> None:
    site = load_site(make_site(tmp_path, records=60, rounds=50))

    def one(number: int) -> bool:
        with site.open_ledger() as ledger:
            try:
                ledger.reserve(f"{number:064x}", site.plan, at_most=5)
            except BudgetSpentError:
                return False
            return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(16))) == 5
