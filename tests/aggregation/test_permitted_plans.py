"""The noise floor of permitted plans is below honest updates and above attackers' updates."""

from __future__ import annotations

import importlib.util
import logging
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from noisewise.aggregation import ServerView, UpdateMatrix
from noisewise.aggregation.base import Disclosure
from noisewise.aggregation.guard import Guard
from noisewise.aggregation.method_facts import METHODS
from noisewise.aggregation.methods import Method, make_method
from noisewise.aggregation.noise_floor import plan_noise
from noisewise.aggregation.permitted_plans import Permitted, floor_basis
from noisewise.cli import app
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError
from noisewise.flower.new_app import AppSettings, write_app
from noisewise.privacy.plan import make_plan

SIZE, RATE = 650, 0.5
WIDE = Permitted(
    epsilon=4.0, delta=1e-5, records=(90, 700), batch=(16, 60), epochs=(1, 3), rounds=10,
    clip_norm=0.5,
)  # fmt: skip


def template_config(folder: Path, **options: Any) -> dict[str, Any]:
    """The config of the app that `noisewise flower new` writes."""
    write_app(folder, AppSettings(**options))
    written = tomllib.loads((folder / "pyproject.toml").read_text())
    config: dict[str, Any] = written["tool"]["flwr"]["app"]["config"]
    return config


def honest_energies() -> list[float]:
    """Noise energies of the demo's sites (see the template's ``demo.py``): epsilon 2 to 16."""
    return [
        plan_noise(
            make_plan(ClientSpec(f"{epsilon}", 300, 64, epsilon, 1e-4, 4), rounds=3, clip_norm=1.0),
            SIZE,
            RATE,
        )
        for epsilon in (2.0, 4.0, 8.0, 16.0, 2.0)
    ]


def noise(energy: float, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=SIZE) * np.sqrt(energy / SIZE)
    return torch.from_numpy(values.astype(np.float32))


def load(path: Path) -> Any:
    """A module of the written app."""
    spec = importlib.util.spec_from_file_location(f"written_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # a log that it turns on would stay on
        patch.setattr("noisewise.flower.show_log", lambda: None)
        spec.loader.exec_module(module)
    return module


ATTACKS = {
    "tiny": [torch.full((SIZE,), 1e-4)],
    "tiny noise": [noise(1e-6, 77)],
    "all zero": [torch.zeros(SIZE)],
    "sybil pair": [noise(1.0, 78)] * 2,
    "quiet sybils": [torch.full((SIZE,), -1e-3)] * 3,
}


def weights(method: Method, attack: list[torch.Tensor]) -> tuple[np.ndarray[Any, Any], float]:
    """(weights of the demo's honest sites, total weight of the attackers)."""
    honest = [noise(energy, seed) for seed, energy in enumerate(honest_energies())]
    columns = torch.stack([*honest, *attack], dim=1)
    ids = tuple(str(k) for k in range(columns.shape[1]))
    found = method.aggregator.aggregate(ServerView(UpdateMatrix(columns, ids), 1), {}).weights
    return found[: len(honest)], float(found[len(honest) :].sum())


@pytest.mark.parametrize("attack", ATTACKS)
def test_with_the_templates_defaults_no_quiet_update_gets_any_weight(
    attack: str, tmp_path: Path
) -> None:
    config = template_config(tmp_path)
    assert config["noise-floor"] > 0
    bare = make_method(config["method"])
    guarded = bare.guarded(config["noise-floor"], config["tolerated-attackers"])
    honest, attackers = weights(guarded, ATTACKS[attack])
    assert attackers == 0
    assert np.all(honest > 0)


@pytest.mark.parametrize("attack", ["tiny", "tiny noise", "quiet sybils"])
def test_without_the_floor_a_quiet_update_gets_all_the_weight(attack: str) -> None:
    assert weights(make_method("RobustHDP"), ATTACKS[attack])[1] > 0.99


def test_the_floor_is_below_the_noise_of_every_permitted_plan() -> None:
    """Plans drawn from the ranges, half of them at whole multiples of the batch, and corners."""
    rng = random.Random(0)
    drawn = [(120, 60, 1), (660, 60, 1), (660, 60, 3), (96, 16, 1), (688, 16, 3)]
    for _ in range(30):
        batch = rng.randint(*WIDE.batch)
        records = rng.randint(max(WIDE.records[0], batch), WIDE.records[1])
        if rng.random() < 0.5:
            records = max(WIDE.records[0], records - records % batch)
        drawn.append((records, batch, rng.randint(*WIDE.epochs)))
    plans = [
        make_plan(
            ClientSpec("site", records, batch, WIDE.epsilon, WIDE.delta, epochs),
            rounds=WIDE.rounds,
            clip_norm=WIDE.clip_norm,
        )
        for records, batch, epochs in drawn
    ]
    for normalised in (False, True):
        floor = WIDE.floor(10**6, RATE, normalised=normalised)
        least = min(plan_noise(plan, 10**6, RATE, normalised=normalised) for plan in plans)
        assert 0.7 * least < floor < least


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 8.0},
        {"delta": 1e-7},
        {"rounds": 10},
        {"clip_norm": 2.0},
        {"records": (65, 120)},
        {"batch": (32, 32)},
        {"epochs": (8, 8)},
    ],
)
def test_a_stricter_policy_has_a_higher_floor(change: dict[str, Any]) -> None:
    floors = [p.floor(SIZE, RATE, normalised=False) for p in (Permitted(), Permitted(**change))]
    assert floors[1] > floors[0]


def test_the_floor_scales_with_the_rate_and_the_model() -> None:
    floor = Permitted().floor(10**6, 0.5, normalised=False)
    fast = Permitted().floor(10**6, 1.0, normalised=False)
    large = Permitted().floor(10**7, 0.5, normalised=False)
    assert (fast, large) == pytest.approx((4 * floor, 10 * floor), rel=0.1)


def test_an_honest_site_at_the_floor_is_not_refused_for_a_small_model() -> None:
    """The noise energy of 650 coordinates varies by 5.5 %; the floor has a margin for this."""
    permitted = Permitted()
    least = min(plan_noise(plan, SIZE, RATE) for plan in permitted.plans())
    method = make_method("RobustHDP", {"estimator": "norm"})
    guarded = method.guarded(permitted.floor(SIZE, RATE, normalised=False), 1)
    refused = 0
    for start in range(0, 1000, 10):
        columns = torch.stack([noise(least, seed) for seed in range(start, start + 10)], dim=1)
        view = ServerView(UpdateMatrix(columns, tuple("abcdefghij")), 1)
        refused += len(guarded.aggregator.aggregate(view, {}).refused)
    assert refused == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"records": (9, 3)}, "records = '9:3': must be smallest:largest"),
        ({"batch": (0, 3)}, "batch = 0"),
        ({"batch": (500, 600)}, "batch = 500: must not exceed"),
        ({"rounds": 0}, "rounds = 0"),
        ({"clip_norm": float("nan")}, "clip_norm = nan"),
    ],
)
def test_an_impossible_policy_is_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        Permitted(**options)


def test_the_command_line_writes_the_floor_of_its_options(tmp_path: Path) -> None:
    options = [
        "--method", "NoiseWise", "--learning-rate", "0.1", "--model", "mlp", "--input-shape", "12",
        "--classes", "3", "--epsilon-max", "4", "--delta-max", "1e-6", "--records", "200:900",
        "--batch", "16:32", "--epochs", "1:2", "--rounds-min", "20", "--clip-norm-min", "0.5",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["flower", "new", str(tmp_path / "app"), *options])
    assert done.exit_code == 0, done.output
    written = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    config = written["tool"]["flwr"]["app"]["config"]
    permitted = Permitted(4.0, 1e-6, (200, 900), (16, 32), (1, 2), 20, 0.5)
    settings = AppSettings("NoiseWise", 0.1, "mlp", (12,), 3, permitted)
    assert config["noise-floor"] == permitted.floor(settings.size, 0.1, normalised=True)
    assert config["noise-floor-for"] == floor_basis("NoiseWise", 0.1, settings.size)
    assert config["server-steps"] >= 7
    assert f"noise floor: {config['noise-floor']:g}" in done.output.lower()
    assert permitted.words() in done.output
    site = tomllib.loads((tmp_path / "app" / "site.toml").read_text())
    assert site["model"] == {"name": "mlp", "input_shape": [12], "classes": 3}
    assert site["training"]["normalise"] is True
    again = CliRunner().invoke(app, ["flower", "floor", *options])
    assert f"noise-floor = {config['noise-floor']:g}\n" in again.output


@pytest.mark.parametrize(
    ("option", "value"),
    [("--records", "5:x"), ("--batch", "1:2:3"), ("--input-shape", "a"), ("--method", "WeiAvg")],
)
def test_a_wrong_option_writes_nothing(option: str, value: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["flower", "new", str(tmp_path / "app"), option, value])
    assert isinstance(done.exception, InvalidValueError)
    assert option.lstrip("-") in str(done.exception)
    assert not (tmp_path / "app").exists()


def test_which_methods_need_a_floor() -> None:
    needy = {name for name in METHODS if make_method(name).can_be_guarded}
    assert needy >= {"NoiseWise", "RobustHDP"}
    assert not needy & {"WeiAvg", "PFA", "BudgetAvg", "DPFedAvg", "MinEpsilon", "FedAvg", "Oracle"}
    assert make_method("RobustHDP").guard is None
    assert make_method("RobustHDP").guarded(1.0, 1).guard == Guard(1.0, 1)


# ------------------------------------------------------------ what the server says at its start


@pytest.mark.extras
def test_every_start_without_a_floor_says_loudly_what_is_not_protected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
    from flower_cases import LocalGrid, honest, start_arrays

    from noisewise.flower.strategy import NoiseAware

    def warnings(method: Any, **options: Any) -> int:
        caplog.clear()
        nodes = {k: honest() for k in range(1, 4)}
        strategy = NoiseAware(method, learning_rate=0.2, **options)
        for rounds in (1, 1):
            strategy.start(LocalGrid(nodes), start_arrays(), rounds)
        said = [r for r in caplog.records if "WITHOUT A NOISE FLOOR" in r.getMessage()]
        assert all(record.levelno == logging.WARNING for record in said)
        return len(said)

    assert warnings("RobustHDP") == 2  # once for each start
    assert warnings(make_method("NoiseWise", {"server_steps": 3.0})) == 2
    assert warnings(make_method("RobustHDP").guarded(1e-6, 1)) == 0
    disclosed = {Disclosure.EPSILON: {1: 1.0, 2: 1.0, 3: 1.0}}
    assert warnings("WeiAvg", disclosed=disclosed) == 0


@pytest.mark.extras
def test_the_demo_learns_under_the_templates_floor_and_drops_no_honest_site(
    tmp_path: Path,
) -> None:
    """The demo's five sites with clients and ledgers, and one site that sends no noise."""
    pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
    from flower_cases import LocalGrid, context
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    from noisewise.flower.client import make_client_app
    from noisewise.flower.public_scores import public_evaluation
    from noisewise.flower.strategy import NoiseAware
    from noisewise.training.models import make_model

    config = template_config(tmp_path)
    load(tmp_path / "demo.py").main(tmp_path / "demo", 5, 3)

    def node(number: int) -> Any:
        site = make_client_app(tmp_path / "demo" / f"site-{number}" / "site.toml")
        return lambda message: site(message, context())

    def quiet(message: Message) -> Message:
        shapes = {name: part.shape for name, part in message.content["arrays"].items()}
        tiny = {name: Array(np.full(shape, 1e-3, np.float32)) for name, shape in shapes.items()}
        return Message(RecordDict({"delta": ArrayRecord(tiny)}), reply_to=message)

    method = load(tmp_path / "noisewise_app" / "server_app.py").method(config)
    strategy = NoiseAware(method, learning_rate=config["learning-rate"], min_clients=3)
    model = make_model(config["model"], (1, 8, 8), config["classes"], seed=0)
    strategy.start(
        LocalGrid({**{k: node(k) for k in range(5)}, 9: quiet}),
        ArrayRecord(dict(model.named_parameters())),
        config["num-rounds"],
        evaluate_fn=public_evaluation(model, tmp_path / "demo" / "public.npz"),
    )
    assert strategy.run is not None
    for record in strategy.run.records:
        assert set(record.dropped) == {"9"}
        assert record.weights["9"] == 0
    assert strategy.run.records[-1].mean_accuracy > 0.5


@pytest.mark.extras
def test_the_templates_server_warns_of_a_floor_for_other_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
    config = template_config(tmp_path)
    server = load(tmp_path / "noisewise_app" / "server_app.py")
    server.check_floor(config, 0.5, SIZE)
    assert "computed for" not in caplog.text
    for rate, change in ((0.1, {}), (0.5, {"method": "NoiseWise"})):
        caplog.clear()
        server.check_floor(config | change, rate, SIZE)
        assert "learning rate 0.5, 650 parameters, but this run has" in caplog.text
    caplog.clear()
    server.check_floor(config, 0.5, 651)
    assert "650 parameters, but this run has RobustHDP, learning rate 0.5, 651" in caplog.text
    caplog.clear()
    server.check_floor(config | {"noise-floor-for": ""}, 0.1, SIZE)
    assert "computed for" not in caplog.text
    assert server.method(config).guard is not None


def test_one_epoch_and_one_round_are_singular() -> None:
    assert (
        "1 local epoch, budgets planned for at least 1 round,"
        in Permitted(epochs=(1, 1), rounds=1).words()
    )
    assert "4 local epochs, budgets planned for at least 3 rounds," in Permitted().words()
