"""The strategy gives the results of the simulator; no reply ends a run (guarantees 8 and 14)."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_parts
import pytest
import torch

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from federation_helpers import small_clients, small_model  # noqa: E402
from flower_cases import LocalGrid, honest, start_arrays  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict  # noqa: E402
from model_files import trained_vector  # noqa: E402

from noisewise.aggregation import screening  # noqa: E402
from noisewise.aggregation.auto_steps import AutoSteps  # noqa: E402
from noisewise.aggregation.base import Disclosure  # noqa: E402
from noisewise.aggregation.methods import make_method, plan_clients  # noqa: E402
from noisewise.aggregation.robust_hdp import RobustHDP  # noqa: E402
from noisewise.aggregation.schedules import Schedule  # noqa: E402
from noisewise.errors import InvalidValueError, NoUpdatesError, UpdateError  # noqa: E402
from noisewise.federation import Prepared, TrainingSettings, checkpoint, simulate  # noqa: E402
from noisewise.federation.executors import Execution, Workload, one_thread  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower import replies  # noqa: E402
from noisewise.flower.parameter_records import layout_of, read_theta, to_record  # noqa: E402
from noisewise.flower.strategy import NoiseAware  # noqa: E402
from noisewise.noise.sampling import sample_index  # noqa: E402
from noisewise.training.parameters import ParameterLayout  # noqa: E402

RATE = 0.2


def altered(change: Any) -> Any:
    """An honest client whose array record is changed before it is sent."""

    def answer(message: Message) -> Message:
        reply = honest()(message)
        found = change(reply.content["delta"], message)
        content = found if isinstance(found, RecordDict) else RecordDict({"delta": found})
        return Message(content, reply_to=message)

    return answer


@pytest.mark.parametrize(
    ("method", "options", "asked"),
    [
        ("RobustHDP", {}, RATE),
        ("NoiseWise", {"server_steps": 3.0, "average_rounds": 3}, RATE),
        ("NoiseWise", {"server_steps": 1 / RATE}, "auto"),
    ],
)
def test_the_same_deltas_give_the_same_model_bit_for_bit(
    method: str, options: dict[str, Any], asked: Any, tmp_path: Path
) -> None:
    clients, model, chosen = small_clients(), small_model(), make_method(method, options)
    rounds, plain = 8 if asked == "auto" else 3, chosen
    if asked == "auto":
        chosen = replace(chosen, auto=AutoSteps(rounds))
    plans = plan_clients([c.spec for c in clients], chosen, rounds=rounds, clip_norm=1.0)
    settings = TrainingSettings(rounds, RATE)
    simulated = simulate(
        Prepared(clients, plans, chosen, model, settings), folder=tmp_path / "simulated"
    )
    layout = ParameterLayout.of(model)
    work = Workload(
        model=model, loss=torch.nn.functional.cross_entropy, clients=clients, plans=plans,
        learning_rate=RATE, seed=0, physical_batch=settings.physical_batch, device="cpu",
        metrics=(), loss_records=8, normalise=chosen.normalise,
    )  # fmt: skip
    executor = Execution().start(work, layout.flatten(model))

    def node(member: int) -> Any:
        def answer(message: Message) -> Message:
            theta = read_theta(message.content["arrays"], layout)
            number = int(message.content["config"]["server-round"])
            assert message.content["config"]["learning-rate"] == RATE
            (delta,) = executor.updates(theta, number, [member])
            return Message(RecordDict({"delta": to_record(layout, delta)}), reply_to=message)

        return answer

    grid = LocalGrid({100 + k: node(k) for k in range(len(clients))})
    strategy = NoiseAware(plain, learning_rate=asked, folder=tmp_path / "flower")
    with one_thread():
        strategy.start(grid, ArrayRecord(dict(model.named_parameters())), num_rounds=rounds)
    ours = trained_vector(tmp_path / "flower" / "model.safetensors")
    theirs = trained_vector(tmp_path / "simulated" / "model.safetensors")
    assert torch.equal(ours, theirs)
    assert strategy.run is not None
    for mine, other in zip(strategy.run.records, simulated.rounds, strict=True):
        assert list(mine.weights.values()) == list(other.weights.values())
        assert list(mine.noise_estimate.values()) == list(other.noise_estimate.values())  # type: ignore[union-attr]


def test_the_automatic_rate_needs_the_number_of_rounds() -> None:
    strategy = NoiseAware("RobustHDP", learning_rate="auto")
    arrays = ArrayRecord(dict(small_model().named_parameters()))
    with pytest.raises(InvalidValueError, match=r"learning_rate = 'auto': requires start\(\)"):
        strategy.configure_train(1, arrays, ConfigRecord(), LocalGrid({1: honest(), 2: honest()}))


def wrong_shape(record: ArrayRecord, message: Message) -> ArrayRecord:
    name = next(iter(record))
    return ArrayRecord({**record, name: Array(np.zeros((3, 3), np.float32))})


def lying_header(record: ArrayRecord, message: Message) -> ArrayRecord:
    """Claims the right shape beside the data and a gigantic one inside."""
    name, array = next(iter(record.items()))
    data = array.data.replace(b"(10, 64)", b"(9999999999, 64)"[:8])
    return ArrayRecord({**record, name: Array("float32", array.shape, "numpy.ndarray", data)})


def with_value(value: float) -> Any:
    def change(record: ArrayRecord, message: Message) -> ArrayRecord:
        name = list(record)[-1]
        values = record[name].numpy().copy()
        values.reshape(-1)[0] = value
        return ArrayRecord({**record, name: Array(values)})

    return change


BAD = {
    "nan": altered(with_value(np.nan)),
    "inf": altered(with_value(np.inf)),
    "shape": altered(wrong_shape),
    "header": altered(lying_header),
    "dtype": altered(
        lambda r, m: ArrayRecord({k: Array(a.numpy().astype(np.float64)) for k, a in r.items()})
    ),
    "names": altered(lambda r, m: ArrayRecord({f"x{k}": a for k, a in r.items()})),
    "missing": altered(lambda r, m: ArrayRecord(dict(list(r.items())[:1]))),
    "empty": altered(lambda r, m: RecordDict()),
    "two records": altered(lambda r, m: RecordDict({"delta": r, "arrays": r})),
    "garbage": altered(
        lambda r, m: ArrayRecord(
            {
                k: Array("float32", a.shape, "numpy.ndarray", b"x" * len(a.data))
                for k, a in r.items()
            }
        )
    ),
    "error": lambda m: Message(Error(451, "not taking part"), reply_to=m),
    "silent": lambda m: None,
}


def test_every_bad_reply_is_dropped_with_a_reason_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = {k: honest() for k in range(1, 5)} | {10 + k: bad for k, bad in enumerate(BAD.values())}
    strategy = NoiseAware(
        "RobustHDP", learning_rate=RATE, folder=tmp_path, round_seconds=1.0, poll_seconds=0.05
    )
    with caplog.at_level(logging.WARNING):
        strategy.start(LocalGrid(nodes), start_arrays(), num_rounds=2)
    assert strategy.run is not None
    for record in strategy.run.records:
        assert sorted(record.weights) == ["1", "2", "3", "4"]
        assert set(record.dropped) == {str(10 + k) for k in range(len(BAD))}
        assert all(record.dropped.values())
        assert max(map(len, record.dropped.values())) < 300
    assert all(f"client {10 + k} " in caplog.text for k in range(len(BAD)))
    run = load_run(tmp_path)
    assert run.status == "finished"
    assert len(run.rounds) == 2
    assert not any((tmp_path / "incoming").iterdir())


def test_full_arrays_are_as_good_as_deltas() -> None:
    def full(record: ArrayRecord, message: Message) -> RecordDict:
        start = message.content["arrays"]
        return RecordDict(
            {
                "arrays": ArrayRecord(
                    {k: Array(start[k].numpy() + a.numpy()) for k, a in record.items()}
                )
            }
        )

    results = []
    for node in (honest(), altered(full)):
        strategy = NoiseAware("RobustHDP", learning_rate=RATE)
        found = strategy.start(LocalGrid(dict.fromkeys(range(1, 5), node)), start_arrays(), 1)
        results.append(read_theta(found.arrays, layout_of(found.arrays)))
    assert torch.allclose(*results, atol=1e-7)
    assert not torch.equal(results[0], read_theta(start_arrays(), layout_of(start_arrays())))


def test_a_restarted_server_goes_on_and_ends_with_the_same_model(tmp_path: Path) -> None:
    nodes = {k: honest() for k in range(1, 5)}

    def scored(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.1 * number})

    def strategy(folder: Path) -> NoiseAware:
        return NoiseAware("RobustHDP", learning_rate=RATE, folder=folder)

    whole = strategy(tmp_path / "whole").start(
        LocalGrid(nodes), start_arrays(), 4, evaluate_fn=scored
    )

    class DiesInRound3(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            if len(self.seen) >= 8:
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with pytest.raises(KeyboardInterrupt):
        strategy(tmp_path / "cut").start(DiesInRound3(nodes), start_arrays(), 4, evaluate_fn=scored)
    assert load_run(tmp_path / "cut").status == "unfinished"
    grid = LocalGrid(nodes)
    other_start = ArrayRecord({k: Array(a.numpy() + 1) for k, a in start_arrays().items()})
    resumed = strategy(tmp_path / "cut").start(grid, other_start, 4, evaluate_fn=scored)
    assert len(grid.seen) == 8  # two rounds of four clients
    assert all(
        np.array_equal(resumed.arrays[k].numpy(), whole.arrays[k].numpy()) for k in whole.arrays
    )
    one, two = load_run(tmp_path / "whole"), load_run(tmp_path / "cut")
    assert one.rounds == two.rounds
    assert two.accuracy == pytest.approx(0.4)
    again = strategy(tmp_path / "cut").start(LocalGrid({}), start_arrays(), 4)  # asks nobody
    assert np.array_equal(again.arrays["1.weight"].numpy(), whole.arrays["1.weight"].numpy())


@pytest.mark.parametrize("options", [{"average_rounds": 2}, {"server_steps": 4.0}])
def test_a_folder_of_another_method_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    grid = LocalGrid({k: honest() for k in range(1, 4)})
    first, other = (make_method("NoiseWise", {"server_steps": 3.0} | own) for own in ({}, options))
    NoiseAware(first, learning_rate=RATE, folder=tmp_path).start(grid, start_arrays(), 1)
    with pytest.raises(InvalidValueError, match="other settings"):
        NoiseAware(other, learning_rate=RATE, folder=tmp_path).start(grid, start_arrays(), 2)


def test_a_folder_in_which_another_server_plays_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.0)
    nodes = {k: honest() for k in range(1, 4)}

    def play(grid: LocalGrid, rounds: int) -> None:
        NoiseAware("RobustHDP", learning_rate=RATE, folder=tmp_path).start(
            grid, start_arrays(), rounds
        )

    refused = []

    class MeetsAnother(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            idle = LocalGrid(nodes)
            with pytest.raises(InvalidValueError, match="another process is training this run"):
                play(idle, 9)
            assert not idle.seen
            refused.append(len(self.seen))
            return super().push_messages(messages)

    play(MeetsAnother(nodes), 2)
    assert refused == [0, 0, 3]  # at the question for declarations, and in both rounds
    assert load_run(tmp_path).status == "finished"
    play(LocalGrid(nodes), 3)  # the lock went with the run
    assert len(load_run(tmp_path).rounds) == 3


def test_too_few_clients_is_a_named_error_and_not_an_endless_wait() -> None:
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, min_clients=3, wait_seconds=0.2)
    with pytest.raises(UpdateError, match="2 of at least 3 clients"):
        strategy.start(LocalGrid({1: honest(), 2: honest()}), start_arrays(), 1)


def test_rounds_below_min_clients_leave_the_model_alone_and_end_the_run_at_last() -> None:
    nodes = {1: honest(), 2: BAD["nan"], 3: BAD["error"]}
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, failures_allowed=1)
    with pytest.raises(NoUpdatesError, match="no round changed the model \\(2 rounds played\\)"):
        strategy.start(LocalGrid(nodes), start_arrays(), 5)
    assert strategy.run is not None
    assert torch.equal(
        strategy.run.snapshot.theta, read_theta(start_arrays(), layout_of(start_arrays()))
    )


def test_what_a_server_may_not_know_is_refused_and_what_sites_must_tell_is_said_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidValueError, match="true noise"):
        NoiseAware("Oracle", learning_rate=RATE)
    with pytest.raises(InvalidValueError, match="no privacy"):
        NoiseAware("FedAvg", learning_rate=RATE)
    with pytest.raises(InvalidValueError, match="disclosed"):
        NoiseAware("WeiAvg", learning_rate=RATE)
    with caplog.at_level(logging.WARNING):
        disclosed = {Disclosure.EPSILON: {1: 1.0, 2: 3.0}}
        strategy = NoiseAware("WeiAvg", learning_rate=RATE, disclosed=disclosed)
    assert "every site discloses its epsilon to the server" in caplog.text
    strategy.start(LocalGrid({1: honest(), 2: honest(), 3: honest()}), start_arrays(), 1)
    assert strategy.run is not None
    record = strategy.run.records[0]
    assert record.weights == pytest.approx({"1": 0.25, "2": 0.75})
    assert "3" in record.dropped


def test_flower_can_drive_the_rounds_itself() -> None:
    """`configure_train` and `aggregate_train` alone, as Flower's own loop calls them."""
    nodes = {k: honest() for k in range(1, 5)}
    driven = NoiseAware("RobustHDP", learning_rate=RATE)
    grid = LocalGrid(nodes)
    replies = grid.send_and_receive(
        driven.configure_train(1, start_arrays(), flwr_app.ConfigRecord(), grid)
    )
    arrays, metrics = driven.aggregate_train(1, replies)
    whole = NoiseAware("RobustHDP", learning_rate=RATE).start(LocalGrid(nodes), start_arrays(), 1)
    assert metrics is None
    assert arrays is not None
    assert all(np.array_equal(arrays[k].numpy(), whole.arrays[k].numpy()) for k in arrays)


def test_the_report_reads_a_servers_run(tmp_path: Path) -> None:
    from noisewise.report.comparison_report import write_report
    from noisewise.report.run_sets import find_runs

    nodes = {k: honest(0.01 * k) for k in range(1, 5)} | {5: BAD["nan"]}
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, folder=tmp_path / "run")
    scored = {n: MetricRecord({"accuracy": 0.2 * n}) for n in range(1, 4)}
    strategy.start(
        LocalGrid(nodes), start_arrays(), 3, evaluate_fn=lambda number, arrays: scored[number]
    )
    write_report(find_runs([tmp_path / "run"]).sets, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "not checked: a server sees updates, not how they were made" in page
    assert "NaN or infinite" in page
    assert "no privacy at all" not in page
    assert "updates carry no noise" not in page


@pytest.mark.parametrize("name", ["NoiseWise", "RobustHDP"])
def test_no_client_can_foresee_which_coordinates_the_server_reads(name: str) -> None:
    options = {"server_steps": 8} if name == "NoiseWise" else {}
    method = make_method(name, options)
    deployed = NoiseAware(method, learning_rate=0.1).method
    assert method.aggregator.estimator.seed == 0  # type: ignore[attr-defined]
    assert deployed.aggregator.estimator.seed is None  # type: ignore[attr-defined]
    first, second = (sample_index(100_000, 1_000, None) for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(sample_index(100_000, 1_000, 0), sample_index(100_000, 1_000, 0))
    assert (
        NoiseAware("WeiAvg", learning_rate=0.1, disclosed={Disclosure.EPSILON: {}}).method
        is not None
    )


@pytest.mark.parametrize("around", ["RobustHDP", "NoiseWise"])
def test_a_server_refuses_an_own_estimator_that_does_not_say_what_it_reads(around: str) -> None:
    class Declared(own_parts.Guess):
        reads_all_coordinates = True

    steps = {"server_steps": 3.0} if around == "NoiseWise" else {}

    def server(estimator: Any) -> NoiseAware:
        method = make_method(around, {"estimator": estimator, **steps})
        return NoiseAware(method, learning_rate=RATE)

    with pytest.raises(InvalidValueError, match=r"estimator = 'Guess'.*reads_all_coordinates.*own"):
        server(own_parts.Guess())
    assert server(Declared()).method.aggregator.estimator.name == "guess"  # type: ignore[attr-defined]


def test_a_server_refuses_an_own_aggregator_that_does_not_say_what_it_reads() -> None:
    with pytest.raises(InvalidValueError, match=r"method = 'Median'.*reads_all_coordinates.*own"):
        NoiseAware(own_parts.Median(), learning_rate=RATE)
    NoiseAware(own_parts.ByNoise(), learning_rate=RATE)


def test_an_own_aggregator_can_be_guarded_on_a_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weight_of_the_quiet(name: str, floor: float) -> float:
        method = make_method("own_parts:ByNoise")
        nodes = {1: honest(), 2: honest(), 3: honest(), 4: honest(scale=1e-6)}
        strategy = NoiseAware(
            method.guarded(floor, 1) if floor else method,
            learning_rate=RATE,
            folder=tmp_path / name,
        )
        strategy.start(LocalGrid(nodes), start_arrays(), 1)
        result = load_run(tmp_path / name)
        assert result.settings["noise_floor"] == (floor or None)
        return result.rounds[0].weights["4"]

    assert weight_of_the_quiet("guarded", 0.03) == 0  # honest energy: 650 * 0.01^2 = 0.065
    assert "WITHOUT A NOISE FLOOR" not in caplog.text
    assert weight_of_the_quiet("bare", 0.0) > 0.99
    assert "WITHOUT A NOISE FLOOR" in caplog.text


def test_a_server_with_an_aggregator_of_its_own_can_be_restarted(tmp_path: Path) -> None:
    """A plain object's repr has its address, which is another one after a restart."""

    class Plain:
        needs: frozenset[Disclosure] = frozenset()

        def reseeded(self, seed: int | None) -> Any:
            return Plain()

        def aggregate(self, view: Any, state: Any) -> Any:
            return RobustHDP().reseeded(None).aggregate(view, state)

    nodes = {k: honest() for k in range(1, 4)}
    kept = [Plain(), Plain()]  # both alive: two addresses
    for number, own in enumerate(kept, start=1):
        strategy = NoiseAware(own, learning_rate=RATE, folder=tmp_path)
        strategy.start(LocalGrid(nodes), start_arrays(), number)
    assert len(load_run(tmp_path).rounds) == 2


def test_an_update_is_screened_once_when_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second screening would read every update twice from disk."""
    seen: list[str | None] = []
    check = screening.update_fault

    def counted(*given: Any) -> str | None:
        seen.append(check(*given))
        return seen[-1]

    monkeypatch.setattr(replies, "update_fault", counted)
    monkeypatch.setattr(screening, "update_fault", counted)
    nodes = {k: honest() for k in range(1, 4)} | {9: BAD["nan"]}
    strategy = NoiseAware("RobustHDP", learning_rate=RATE)
    strategy.start(LocalGrid(nodes), start_arrays(), 1)
    assert sorted(map(str, seen)) == ["None"] * 3 + ["has 1 NaN or infinite values"]
    assert strategy.run is not None
    assert strategy.run.records[0].dropped == {"9": "has 1 NaN or infinite values"}


def test_a_schedule_sets_the_rate_of_each_round() -> None:
    """The server divides updates by the factor: sites must train with the rate that has it."""
    rates: list[float] = []

    def site(number: int) -> Any:
        def answer(message: Message) -> Message:
            rates.append(float(message.content["config"]["learning-rate"]))
            layout = layout_of(message.content["arrays"])
            generator = torch.Generator().manual_seed(len(rates))
            delta = rates[-1] * torch.randn(layout.size, generator=generator)
            return Message(RecordDict({"delta": to_record(layout, delta)}), reply_to=message)

        return answer

    schedule = Schedule("linear", rounds=4)
    method = replace(make_method("RobustHDP").guarded(60.0, 1), schedule=schedule)
    strategy = NoiseAware(method, learning_rate=0.2)
    arrays = ArrayRecord({"weight": torch.zeros(6_500)})
    with one_thread():
        strategy.start(LocalGrid({k: site(k) for k in range(1, 4)}), arrays, num_rounds=4)
    assert rates == pytest.approx([0.2 * f for f in schedule.factors() for _ in range(3)])
    assert strategy.run is not None
    # The floor is 23 % of the energy 6,500 * 0.2^2 of the first round: more than that of the last.
    assert all(not record.dropped for record in strategy.run.records)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, "1.0", None, math.inf])
def test_a_disclosed_value_is_checked_before_sites_train(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="disclosed epsilon of client 7 = "):
        NoiseAware("WeiAvg", learning_rate=RATE, disclosed={Disclosure.EPSILON: {3: 1.0, 7: value}})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"disclosed": {"epsilon": {1: 1.0}}}, r"disclosed = .*must be \{Disclosure.EPSILON"),
        ({"disclosed": {Disclosure.EPSILON: 1.0}}, "disclosed = .*must be"),
        ({"disclosed": [1.0]}, "disclosed = .*must be"),
        ({"task": "classification"}, "task = 'classification': must be a Task"),
        ({"task": None}, "task = None: must be a Task"),
        ({"seed": -1}, "seed = -1: must be a whole number"),
        ({"seed": "1"}, "seed = '1': must be a whole number"),
        ({"method": RobustHDP}, "not the class RobustHDP; call the class"),
    ],
)
def test_arguments_of_a_server_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        NoiseAware(**{"method": "RobustHDP", "learning_rate": RATE, **arguments})
