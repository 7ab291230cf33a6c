"""How the run of a server ends: without an update there is no model, and the reasons are named."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from federation_helpers import small_clients, small_model  # noqa: E402
from flower_cases import LocalGrid, context, honest, make_site, start_arrays  # noqa: E402
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict  # noqa: E402

from noisewise.aggregation.drop_reason import DropKind, DropReason  # noqa: E402
from noisewise.aggregation.methods import make_method, plan_clients  # noqa: E402
from noisewise.cli import app  # noqa: E402
from noisewise.errors import NoUpdatesError, UpdateError  # noqa: E402
from noisewise.federation import Prepared, TrainingSettings, simulate  # noqa: E402
from noisewise.federation.checkpoint import Snapshot  # noqa: E402
from noisewise.federation.missing_updates import causes_of  # noqa: E402
from noisewise.federation.results import RunResult, load_run  # noqa: E402
from noisewise.federation.round_record import RoundRecord, read_record  # noqa: E402
from noisewise.federation.server_step import unchanged  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402
from noisewise.flower.strategy import NoiseAware  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.report.comparison_report import write_report  # noqa: E402
from noisewise.report.run_sets import find_runs  # noqa: E402
from noisewise.training.models import make_model  # noqa: E402

ROOT = Path(__file__).parents[2]
RATE = 0.2


def refusing(message: Message) -> Message:
    return Message(Error(451, "not taking part"), reply_to=message)


def silent(message: Message) -> None:
    return None


def until(last: int) -> Any:
    """A site that takes part up to a round."""

    def answer(message: Message) -> Message:
        number = int(message.content["config"]["server-round"])
        return honest()(message) if number <= last else refusing(message)

    return answer


def play(folder: Path, nodes: dict[int, Any], rounds: int, **more: Any) -> NoiseAware:
    options = {"round_seconds": 0.5, "poll_seconds": 0.05, "failures_allowed": 2} | more
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, folder=folder, **options)
    strategy.start(LocalGrid(nodes), start_arrays(), rounds)
    return strategy


def check_no_updates(folder: Path) -> RunResult:
    """What a run without any update must leave behind."""
    run = load_run(folder)
    assert run.status == "no_updates"
    assert run.rounds_changed == 0
    assert json.loads((folder / "result.json").read_text())["status"] == "no_updates"
    assert not (folder / "model.safetensors").exists()
    return run


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_a_run_without_any_update_has_its_own_status_and_no_model(
    tmp_path: Path, rounds: int
) -> None:
    """Also where no more rounds failed than are allowed in a row."""
    with pytest.raises(NoUpdatesError) as caught:
        play(tmp_path, dict.fromkeys(range(1, 4), refusing), rounds)
    assert len(check_no_updates(tmp_path).rounds) == min(rounds, 3)
    words = str(caught.value)
    assert "there is no trained model" in words
    assert f"3 sites ({3 * min(rounds, 3)} updates): gave no update (code 451)" in words
    assert "noisewise ledger why" in words


def test_the_check_sees_a_server_that_calls_such_a_run_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundRecord, "changed", True)
    play(tmp_path, dict.fromkeys(range(1, 4), refusing), 1)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_no_updates(tmp_path)


def test_every_cause_comes_with_advice(tmp_path: Path) -> None:
    def lost(message: Message) -> Message:
        return Message(Error(5, "node unavailable"), reply_to=message)

    def crashed(message: Message) -> Message:
        return Message(Error(2, "the app raised"), reply_to=message)

    def other_model(message: Message) -> Message:
        arrays = ArrayRecord(
            {"other": Array(next(iter(message.content["arrays"].values())).numpy())}
        )
        return Message(RecordDict({"delta": arrays}), reply_to=message)

    nodes = {1: refusing, 2: silent, 3: lost, 4: crashed, 5: other_model, 6: honest()}
    with pytest.raises(NoUpdatesError) as caught:
        play(tmp_path, nodes, 2)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 6
    for words in (
        "(code 451): the site refused",
        "did not answer in the round: no reply before the round closed: give a round more time",
        "(code 5): Flower lost the node",
        "(code 2): the site's app failed",
        "the site trains another model",
        "1 of at least 2 updates: the model does not change: too few usable updates",
    ):
        assert sum(words in line for line in lines) == 1, words
    assert all(line.startswith("- 1 site (2 updates): ") for line in lines)


def test_reasons_that_differ_in_numbers_count_as_one() -> None:
    record = RoundRecord(1, {}, {}, None, None, {}, None, None, {})
    rounds = [
        replace(
            record,
            dropped={"1": f"has too little noise: energy {n}.5e-07, policy minimum 2"},
            drop_kinds={"1": DropKind.TOO_QUIET},
        )
        for n in range(5)
    ] + [replace(record, dropped={"2": "gave no update (code 2)", "3": "gave no update (code 5)"})]
    first, *others = causes_of(rounds)
    assert (first.clients, first.updates) == (1, 5)
    assert "compare noise-floor" in first.advice
    assert [cause.reason for cause in others] == [
        "gave no update (code 2)",
        "gave no update (code 5)",
    ]
    assert [cause.advice for cause in others] == ["", ""]  # older records have no kinds


@pytest.mark.parametrize("kind", DropKind)
def test_a_kind_of_reason_has_advice_and_survives_the_file(kind: DropKind) -> None:
    error = UpdateError(DropReason("a reason", kind))
    reason = DropReason.of(error, "; more")
    assert (reason, reason.kind) == ("a reason; more", kind)
    snapshot = Snapshot(0, torch.zeros(1), {}, {})
    record = unchanged(snapshot, {"1": reason, "2": "another reason"}).record()
    assert record.drop_kinds == {"1": kind}
    again = read_record(json.dumps(vars(record)))
    assert again == record
    assert sorted(bool(cause.advice) for cause in causes_of([again])) == [False, True]


def test_nobody_connected_is_a_run_without_updates_too(tmp_path: Path) -> None:
    with pytest.raises(NoUpdatesError, match=r"1 of at least 2 clients connected within 0\.2 s"):
        play(tmp_path, {1: honest()}, 2, wait_seconds=0.2)
    assert len(check_no_updates(tmp_path).rounds) == 0
    with pytest.raises(NoUpdatesError):
        play(tmp_path, dict.fromkeys((1, 2), refusing), 1)
    assert len(check_no_updates(tmp_path).rounds) == 1
    with pytest.raises(NoUpdatesError):  # nothing of the attempt before is left
        play(tmp_path, {1: honest()}, 2, wait_seconds=0.2)
    assert len(check_no_updates(tmp_path).rounds) == 0


def test_updates_that_stop_leave_a_model_and_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UpdateError, match="3 rounds in a row did not change the model, after 2"):
        play(tmp_path, {k: until(2) for k in (1, 2, 3)}, 8)
    run = load_run(tmp_path)
    assert (run.status, len(run.rounds), run.rounds_changed) == ("unfinished", 5, 2)
    assert (tmp_path / "model.safetensors").exists()
    strategy = play(tmp_path, {k: honest() for k in (1, 2, 3)}, 8)
    run = load_run(tmp_path)
    assert (run.status, len(run.rounds), run.rounds_changed) == ("finished", 8, 5)
    assert strategy.run is not None
    page = report(tmp_path, tmp_path / "page")
    assert "8 of 8; 3 did not change the model" in page
    assert "8 of 8 completed; 5 changed the model" in page


def test_sites_that_disconnect_leave_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    class Leaving(LocalGrid):
        def get_node_ids(self) -> list[int]:
            return [] if self.seen else [1, 2, 3]

    nodes = {k: honest() for k in (1, 2, 3)}
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, folder=tmp_path, wait_seconds=0.2)
    with pytest.raises(UpdateError, match="0 of at least 2 clients connected") as caught:
        strategy.start(Leaving(nodes), start_arrays(), 3)
    assert not isinstance(caught.value, NoUpdatesError)
    run = load_run(tmp_path)
    assert (run.status, len(run.rounds), run.rounds_changed) == ("unfinished", 1, 1)
    play(tmp_path, nodes, 3)
    assert load_run(tmp_path).rounds_changed == 3


@pytest.mark.parametrize("last", [1, 3])
def test_a_run_whose_last_rounds_had_no_update_is_finished_and_says_so(
    tmp_path: Path, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left to resume, whether or not so many failures in a row are allowed."""
    with caplog.at_level(logging.WARNING):
        play(tmp_path, {k: until(last) for k in (1, 2, 3)}, 4)
    run = load_run(tmp_path)
    assert (run.status, len(run.rounds), run.rounds_changed) == ("finished", 4, last)
    assert (tmp_path / "model.safetensors").exists()
    assert f"{4 - last} of 4 rounds did not change the model" in caplog.text
    play(tmp_path, {}, 4)  # the same command again asks nobody and ends the same way
    assert load_run(tmp_path) == run


def test_the_same_command_starts_again_and_sites_that_answered_are_not_charged_twice(
    tmp_path: Path,
) -> None:
    site = make_site(tmp_path / "site", records=60)
    client = make_client_app()
    start = [
        ArrayRecord(dict(make_model("softmax", (1, 8, 8), 10, seed=seed).named_parameters()))
        for seed in (0, 1)
    ]
    nodes: dict[int, Any] = {1: lambda m: client(m, context(site=str(site))), 2: refusing}

    def attempt(arrays: ArrayRecord) -> None:
        NoiseAware(
            "RobustHDP", learning_rate=RATE, folder=tmp_path / "run", failures_allowed=1
        ).start(LocalGrid(nodes), arrays, 2)

    with pytest.raises(NoUpdatesError):
        attempt(start[0])
    check_no_updates(tmp_path / "run")
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        before = ledger.statement()
    assert len(before.entries) == 2
    nodes[2] = honest()
    attempt(start[1])  # the initial model of the first attempt takes precedence
    run = load_run(tmp_path / "run")
    assert (run.status, [r.round for r in run.rounds]) == ("finished", [1, 2])
    assert all(record.changed for record in run.rounds)
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        after = ledger.statement()
    # Round 1 came from the ledger; round 2 began from another model than in the first attempt.
    assert len(after.entries) == 3
    assert after.entries[:2] == before.entries


def report(folder: Path, output: Path) -> str:
    write_report(find_runs([folder]).sets, output)
    return (output / "report.html").read_text()


def test_the_report_says_that_there_is_no_model_and_why(tmp_path: Path) -> None:
    with pytest.raises(NoUpdatesError):
        play(tmp_path / "run", {1: refusing, 2: refusing, 3: silent}, 1)
    page = report(tmp_path / "run", tmp_path / "page")
    assert "without any update: no round changed the model, so there is no trained model" in page
    assert "no updates: no round changed the model, so there is no trained model" in page
    assert "the site refused" in page
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "page")])
    assert "1 run (1 without any update)" in done.output
    ended = CliRunner().invoke(app, ["flower", "status", str(tmp_path / "run")])
    assert ended.exit_code == 1
    assert "status: no updates: no round changed the model" in ended.output
    assert "the site refused" in ended.output
    play(tmp_path / "run", {k: honest() for k in (1, 2, 3)}, 1)
    ended = CliRunner().invoke(app, ["flower", "status", str(tmp_path / "run")])
    assert ended.exit_code == 0
    assert ended.output.startswith("status: finished\n")
    assert "3 asked; 3 sent at least one update that was used" in ended.output


def test_a_simulation_in_which_no_round_changed_the_model_has_no_model_either(
    tmp_path: Path,
) -> None:
    method = make_method("RobustHDP").guarded(1e9, 1)  # no honest update has so much noise
    clients = small_clients()
    plans = plan_clients([client.spec for client in clients], method, rounds=2, clip_norm=1.0)

    def train() -> RunResult:
        settings = TrainingSettings(2, RATE)
        return simulate(Prepared(clients, plans, method, small_model(), settings), folder=tmp_path)

    result = train()
    assert result.status == "no_updates"
    assert check_no_updates(tmp_path) == result
    assert train() == result


def test_noisewise_run_ends_with_an_error_where_no_round_changed_the_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["run", str(ROOT / "configs" / "demo.toml"), "--output", str(tmp_path), "--set",
         "training.rounds=1", "--set", "policy.tolerated_attackers=1", "--set",
         "policy.permitted=[{epsilon=0.05, delta=1e-6, n_examples=20, batch_size=1}]"],
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "no round changed the model" in done.output
