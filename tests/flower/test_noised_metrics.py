"""Optional noised metrics: one noised number, charged to the ledger, limited and screened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import METRICS, LocalGrid, context, make_site  # noqa: E402
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)

from noisewise.cli import app  # noqa: E402
from noisewise.data import load_dataset  # noqa: E402
from noisewise.errors import InvalidValueError  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402
from noisewise.flower.strategy import NoiseAware  # noqa: E402
from noisewise.flower.wire import NOT_TAKING_PART  # noqa: E402
from noisewise.privacy.ledger import Ledger, Statement  # noqa: E402
from noisewise.randomness import SecureRandom  # noqa: E402
from noisewise.site.site_file import load_site  # noqa: E402
from noisewise.training.models import make_model  # noqa: E402

PUBLIC = 80  # the divisor in the sites' files; the true number of held-out records is another


def metrics_site(
    folder: Path, number: int = 0, *, noise: float = 15.0, releases: int = 3, held: int = 90,
    **more: Any,
) -> Path:  # fmt: skip
    """A site that has opted in, with ``held`` records that it does not train on."""
    site = make_site(folder, number, records=60, **more)
    inputs, targets = load_dataset("digits").train.arrays()
    some = slice(500, 500 + held)
    np.savez(folder / "held.npz", inputs=inputs[some], targets=targets[some])
    text = site.read_text().replace("[model]", 'held_out = "held.npz"\n\n[model]')
    part = METRICS.format(noise=noise, records=PUBLIC, releases=releases)
    site.write_text(text + part)
    return site


def model_arrays(seed: int = 0) -> ArrayRecord:
    return ArrayRecord(dict(make_model("softmax", (1, 8, 8), 10, seed=seed).named_parameters()))


def message(kind: str, config: dict[str, Any], **more: Any) -> Message:
    content = RecordDict({"arrays": model_arrays(), "config": ConfigRecord(config)})
    for name, record in more.items():
        content[name] = record
    return Message(content, 7, kind, group_id=str(config.get("server-round", "")))


def ask(site: Path, number: int = 1) -> Message:
    asked = message("evaluate", {"server-round": number})
    return make_client_app()(asked, context(site=str(site)))


def train(site: Path, number: int = 1) -> Message:
    asked = message("train", {"server-round": number, "learning-rate": 0.2})
    return make_client_app()(asked, context(site=str(site)))


def figure(reply: Message) -> float:
    assert not reply.has_error()
    assert list(reply.content) == ["metrics"]
    assert list(reply.content["metrics"]) == ["noised-accuracy"]
    return float(reply.content["metrics"]["noised-accuracy"])


def refused(reply: Message) -> bool:
    return reply.has_error() and reply.error.reason == NOT_TAKING_PART


def statement(site: Path) -> Statement:
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        return ledger.statement()


def test_one_noised_number_is_charged_and_asked_again_it_is_the_same(tmp_path: Path) -> None:
    site = metrics_site(tmp_path, releases=8)
    first = figure(ask(site))
    (entry,) = statement(site).entries
    assert (entry.purpose, entry.state) == ("metrics", "sealed")
    assert (entry.sample_rate, entry.noise_multiplier, entry.steps) == (1.0, 15.0, 1)
    assert figure(ask(site)) == first
    assert len(statement(site).entries) == 1
    # Figures are whole numbers of records, so two of them agree now and then; seven do not.
    assert any(figure(ask(site, number)) != first for number in range(2, 9))
    assert 2 <= len(statement(site).entries) <= 8


def test_off_by_default_and_refused_in_the_same_words(tmp_path: Path, caplog: Any) -> None:
    site = make_site(tmp_path, records=60)
    assert refused(ask(site))
    assert "[metrics]" in caplog.text
    assert statement(site).entries == ()


def test_a_figure_is_a_whole_number_of_records(tmp_path: Path) -> None:
    """Full-precision noise would tell by its lowest bits which count it was added to."""
    site = metrics_site(tmp_path, releases=8)
    for number in range(1, 9):
        told = figure(ask(site, number))
        assert told == round(told * PUBLIC) / PUBLIC


def test_the_reason_of_a_refusal_is_noted_at_the_site(tmp_path: Path) -> None:
    site = make_site(tmp_path, records=60)
    assert refused(ask(site, 4))
    asked = message("train", {"server-round": 2, "learning-rate": 1e9})
    assert refused(make_client_app()(asked, context(site=str(site))))
    told = CliRunner().invoke(app, ["ledger", "why", str(tmp_path / "site.ledger"), "--last", "2"])
    assert told.exit_code == 0
    assert "[metrics]" in told.output
    assert "learning_rate = '1000000000.0'" in told.output
    broken = tmp_path / "broken.toml"
    broken.write_text("[ledger")
    asked = message("train", {"server-round": 2, "learning-rate": 0.1})
    assert refused(make_client_app()(asked, context(site=str(broken))))
    told = CliRunner().invoke(app, ["ledger", "why", str(broken)])
    assert "must be a site's TOML file" in told.output.replace("\n", " ")


def test_training_and_metrics_share_the_budget_and_both_last_as_planned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = metrics_site(tmp_path, noise=15.0, releases=4, rounds=3, epsilon=1.0)
    alone = make_site(tmp_path / "alone", records=60, rounds=3, epsilon=1.0)
    more = load_site(site).plan.noise_multiplier / load_site(alone).plan.noise_multiplier
    assert 1.02 < more < 1.5
    for number in (1, 2, 3):
        assert not refused(train(site, number))
        figure(ask(site, number))
    figure(ask(site, 4))
    found = statement(site)
    assert 0.95 < found.spent / found.epsilon <= 1
    assert refused(train(site, 4))
    assert "the budget does not allow" in caplog.text
    caplog.clear()
    assert refused(ask(site, 5))
    assert statement(site) == found
    assert not refused(train(site, 2))  # what was answered is still answered, free of charge
    figure(ask(site, 2))


def test_the_number_of_releases_is_a_cap_of_its_own(tmp_path: Path, caplog: Any) -> None:
    site = metrics_site(tmp_path, releases=2)
    figure(ask(site, 1))
    figure(ask(site, 2))
    assert refused(ask(site, 3))
    assert "all 2 noised figures that the site allows" in caplog.text


def test_the_noise_has_the_deviation_that_was_charged(tmp_path: Path) -> None:
    site = metrics_site(tmp_path, noise=20.0, releases=100, epsilon=16.0)
    found = np.array([figure(ask(site, number)) for number in range(1, 101)])
    normals = (found * PUBLIC - right_answers(90)) / 20.0
    check_law(normals)
    with pytest.raises(AssertionError):
        check_law(normals * 0.5)  # too little noise
    with pytest.raises(AssertionError):
        check_law(normals - 1)  # other records


def check_law(normals: Any) -> None:
    """Standard normal; wrong once in a million times, since the noise cannot be seeded."""
    assert stats.kstest(normals, "norm").pvalue > 1e-6
    below = stats.chi2.cdf(float(np.sum(normals**2)), len(normals))
    assert 1e-6 < below < 1 - 1e-6


def right_answers(held: int) -> int:
    import torch

    inputs, targets = load_dataset("digits").train.arrays()
    model = make_model("softmax", (1, 8, 8), 10, seed=0)
    with torch.no_grad():
        guesses = model(torch.from_numpy(inputs[500 : 500 + held])).argmax(dim=1).numpy()
    return int((guesses == targets[500 : 500 + held]).sum())


def test_one_record_more_or_less_moves_the_figure_by_one_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 1 and 2 for the figure: with the noise taken away, sensitivity shows as it is."""
    monkeypatch.setattr(SecureRandom, "normal", lambda self, step, size: np.zeros(size))
    counts = []
    for held in range(80, 100):
        site = metrics_site(tmp_path / str(held), held=held)
        counts.append(figure(ask(site)) * PUBLIC)
        assert [e.noise_multiplier for e in statement(site).entries] == [15.0]
    jumps = np.round(np.diff(counts), 9)
    assert set(jumps) <= {0.0, 1.0}
    assert 1.0 in jumps


@pytest.mark.parametrize(
    "asked",
    [
        message("evaluate", {"server-round": 0}),
        message("evaluate", {"server-round": 1, "learning-rate": 0.2}),
        message("evaluate", {"server-round": 1, "noise_multiplier": 0.0}),
        message("evaluate", {}),
        message("evaluate", {"server-round": 1}, extra=ConfigRecord({"records": 1})),
        Message(RecordDict(), 7, "evaluate"),
        message("query", {"server-round": 1}),
    ],
)
def test_a_server_sets_nothing_about_the_figure(asked: Message, tmp_path: Path) -> None:
    site = metrics_site(tmp_path)
    assert refused(make_client_app()(asked, context(site=str(site))))
    assert statement(site).entries == ()


def test_held_out_records_may_be_test_arrays_and_must_be_somewhere(
    tmp_path: Path, caplog: Any
) -> None:
    site = metrics_site(tmp_path)
    site.write_text(site.read_text().replace('held_out = "held.npz"', ""))
    assert refused(ask(site))
    assert "data.held_out" in caplog.text
    assert statement(site).entries == ()
    with np.load(tmp_path / "records.npz") as file:
        arrays = dict(file)
    held = {"test_inputs": arrays["inputs"][:30], "test_targets": arrays["targets"][:30]}
    np.savez(tmp_path / "records.npz", **arrays, **held)
    figure(ask(site))
    assert len(load_site(site).held_out()) == 30


def test_bad_settings_name_the_field(tmp_path: Path) -> None:
    site = metrics_site(tmp_path)
    text = site.read_text()
    for old, new, field in (
        ("releases = 3", "releases = 0", "metrics.releases"),
        ("noise_multiplier = 15.0", "noise_multiplier = 0.0", "metrics.noise_multiplier"),
        ("noise_multiplier = 15.0", "noise_multiplier = 21.0", "at least 4 noise_multiplier"),
        ("releases = 3", "releases = 1000000", "choose fewer releases"),
        ("releases = 3", "releases = 3\nrate = 1", "metrics.rate"),
    ):
        site.write_text(text.replace(old, new))
        with pytest.raises(InvalidValueError, match=field) as caught:
            load_site(site)
        assert "\n" not in str(caught.value)


def test_check_and_ledger_say_what_leaves_and_how_long_it_lasts(tmp_path: Path) -> None:
    site = metrics_site(tmp_path, releases=5, rounds=3)
    train(site)
    ask(site)
    ask(site, 2)
    done = CliRunner().invoke(app, ["flower", "check", str(site)])
    assert done.exit_code == 0, done.output
    assert "WARNING: 90 usable held-out records, but metrics.records = 80" in done.output
    assert "data.records = 60 is exactly the number of usable records" in done.output
    assert "at most 5 noised scores, each with noise of 19 %" in done.output
    assert "Left: 2 of 3 rounds." in done.output
    assert "Left: 3 of 5 noised scores." in done.output
    shown = CliRunner().invoke(app, ["ledger", "show", str(tmp_path / "site.ledger")]).output
    assert "3 noised replies (1 update of the model, 2 noised scores)" in shown
    assert shown.count(" metrics ") == 2
    page = tmp_path / "page.html"
    CliRunner().invoke(app, ["ledger", "export", str(tmp_path / "site.ledger"), "-o", str(page)])
    assert "2 noised scores" in page.read_text()


def node(site: Path) -> Any:
    client = make_client_app()
    return lambda asked: client(asked, context(site=str(site)))


def lying(site: Path, content: RecordDict) -> Any:
    honest = node(site)

    def answer(asked: Message) -> Message:
        if asked.metadata.message_type.startswith("train"):
            return honest(asked)  # type: ignore[no-any-return]
        return Message(content, reply_to=asked)

    return answer


def metric(value: object, name: str = "noised-accuracy") -> RecordDict:
    return RecordDict({"metrics": MetricRecord({name: value})})  # type: ignore[dict-item]


def test_the_strategy_asks_screens_averages_and_the_report_says_noised(tmp_path: Path) -> None:
    from noisewise.report.comparison_report import write_report
    from noisewise.report.run_sets import find_runs

    lies = [
        metric(float("nan")), metric(1e9), metric(-1.5), metric(1), metric(0.5, "accuracy"),
        metric([0.5, 0.6]), RecordDict(), RecordDict({"metrics": ConfigRecord({})}),
        RecordDict({"metrics": MetricRecord({"noised-accuracy": 0.5}), "more": ConfigRecord({})}),
        RecordDict({"delta": ArrayRecord({"x": Array(np.zeros(3, np.float32))})}),
    ]  # fmt: skip
    nodes = {k: node(metrics_site(tmp_path / f"in-{k}", k, noise=5.0)) for k in (1, 2)}
    nodes[3] = node(make_site(tmp_path / "out", 3, records=60))  # has not opted in
    for k, lie in enumerate(lies):
        nodes[10 + k] = lying(make_site(tmp_path / f"lie-{k}", 4, records=60), lie)
    grid = LocalGrid(nodes)
    strategy = NoiseAware(
        "RobustHDP", learning_rate=0.2, folder=tmp_path / "run", evaluate_every=2,
        poll_seconds=0.05,
    )  # fmt: skip
    result = strategy.start(grid, model_arrays(), num_rounds=3)
    one, two, three = load_run(tmp_path / "run").rounds
    assert one.noised_accuracy is None
    assert three.noised_accuracy is None
    assert two.noised_accuracy is not None
    assert sorted(two.noised_accuracy) == ["1", "2"]
    assert len(two.weights) == len(nodes)
    told = result.evaluate_metrics_clientapp[2]["noised-accuracy"]
    assert told == pytest.approx(np.mean(list(two.noised_accuracy.values())))
    asked = [m for m in grid.seen if m.metadata.message_type == "evaluate"]
    assert len(asked) == len(nodes)
    assert len(statement(tmp_path / "in-1" / "site.toml").entries) == 4
    assert len(statement(tmp_path / "out" / "site.toml").entries) == 3
    write_report(find_runs([tmp_path / "run"]).sets, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Noised score of sites" in page
    assert "These are not true scores" in page
    assert "a noised score, from the sites that chose to send one" in page


def test_nobody_is_asked_unless_the_server_is_told_to(tmp_path: Path) -> None:
    nodes = {k: node(metrics_site(tmp_path / str(k), k)) for k in (1, 2)}
    grid = LocalGrid(nodes)
    strategy = NoiseAware("RobustHDP", learning_rate=0.2, poll_seconds=0.05)
    strategy.start(grid, model_arrays(), num_rounds=1)
    assert {m.metadata.message_type for m in grid.seen} == {"train"}
    with pytest.raises(InvalidValueError, match="evaluate_every"):
        NoiseAware("RobustHDP", learning_rate=0.2, evaluate_every=-1)


def test_flowers_own_loop_gets_the_mean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = {k: node(metrics_site(tmp_path / str(k), k)) for k in (1, 2)}
    grid = LocalGrid(nodes)
    driven = NoiseAware("RobustHDP", learning_rate=0.2, evaluate_every=1)
    sent = driven.configure_train(1, model_arrays(), ConfigRecord(), grid)
    arrays, _ = driven.aggregate_train(1, grid.send_and_receive(sent))
    with caplog.at_level(logging.INFO):
        questions = driven.configure_evaluate(1, arrays, ConfigRecord(), grid)
        found = driven.aggregate_evaluate(1, grid.send_and_receive(questions))
    assert found is not None
    assert -1 <= found["noised-accuracy"] <= 2
    assert driven.aggregate_evaluate(1, []) is None
