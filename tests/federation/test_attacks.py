"""Hostile clients: what they send, and how a guard treats it (docs/privacy.md, guarantee 8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_helpers import small_clients, small_model, small_run
from typer.testing import CliRunner

from noisewise.aggregation import ServerView, UpdateMatrix, make_method, plan_clients
from noisewise.aggregation.guard import Guard, count_small
from noisewise.aggregation.noise_floor import noise_floor, plan_noise
from noisewise.aggregation.noisewise import NoiseWise
from noisewise.aggregation.robust_hdp import RobustHDP
from noisewise.cli import app
from noisewise.data.specs import ClientSpec
from noisewise.errors import InvalidValueError, NoHonestUpdateError
from noisewise.experiments.attack_study import (
    AttackRun,
    attack_rows,
    attack_runs,
    study_attacks,
    train_runs,
)
from noisewise.experiments.config import ExperimentConfig, MethodConfig, load_config
from noisewise.experiments.prepare import prepare_seed, under_policy
from noisewise.experiments.runner import run
from noisewise.federation import Prepared, TrainingSettings, simulate
from noisewise.federation.attacks import ATTACKS, Attack, attacked
from noisewise.federation.results import RunResult
from noisewise.noise import Norm
from noisewise.privacy.plan import make_plan
from noisewise.report.attack_report import attack_figure, attack_text
from noisewise.report.run_sets import find_runs

ROOT = Path(__file__).parents[2]
P, N = 8000, 20
FLOOR = 1.0


def honest(seed: int = 0, signal: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Updates [P, N] with noise between F and 20 F, and the common direction."""
    rng = np.random.default_rng(seed)
    variance = np.geomspace(FLOOR, 20 * FLOOR, N)
    direction = rng.normal(size=P) / np.sqrt(P) * signal
    return direction[:, None] + rng.normal(size=(P, N)) * np.sqrt(variance / P), direction


def server_view(updates: np.ndarray) -> ServerView:
    ids = tuple(f"c{k:02d}" for k in range(updates.shape[1]))
    return ServerView(UpdateMatrix(torch.from_numpy(updates), ids), 1)


def sent(updates: np.ndarray, direction: np.ndarray, attack: Attack) -> np.ndarray:
    """What the server receives when some of the clients attack, with a clean direction."""
    received = {f"c{k:02d}": torch.from_numpy(updates[:, k]) for k in range(N)}
    if attack.properties.noise_free:
        received |= {client: torch.from_numpy(direction.copy()) for client in attack.clients}
    answers = attacked(received, [attack], FLOOR, seed=0, round_number=1)
    return np.stack([answers[client].numpy() for client in sorted(answers)], axis=1)


GUARDED = [NoiseWise(guard=Guard(FLOOR, 1, clip=True)), RobustHDP(Norm(), guard=Guard(FLOOR, 1))]
SCREENED = ["zero", "constant", "sign_flip", "sybils"]


@pytest.mark.parametrize("aggregator", GUARDED, ids=["NoiseWise", "RobustHDP"])
@pytest.mark.parametrize("kind", SCREENED)
def test_what_breaks_the_policy_gets_no_weight(aggregator: Any, kind: str) -> None:
    updates, direction = honest()
    attackers = ("c03", "c11") if kind == "sybils" else ("c03",)
    attack = Attack(kind, attackers)
    assert attack.properties.breaks_policy
    answer = aggregator.aggregate(server_view(sent(updates, direction, attack)), {})
    ids = [f"c{k:02d}" for k in range(N)]
    assert all(answer.weights[ids.index(client)] == 0 for client in attackers)
    assert set(answer.refused) == set(attackers)
    assert answer.weights.sum() == pytest.approx(1)
    cosine = torch.nn.functional.cosine_similarity(answer.delta, torch.from_numpy(direction), 0)
    assert float(cosine) > 0.4


@pytest.mark.parametrize("kind", ["zero", "constant", "sign_flip"])
def test_without_a_guard_the_quiet_attacker_owns_the_round(kind: str) -> None:
    """Power: the same attacks on the paper's method (all-zero updates are refused even there)."""
    updates, direction = honest()
    view = server_view(sent(updates, direction, Attack(kind, ("c03",))))
    weights = RobustHDP(Norm()).aggregate(view, {}).weights
    assert weights[3] == 0 if kind == "zero" else weights[3] > 0.6


def test_noise_at_the_floor_and_scaling_are_bounded() -> None:
    updates, direction = honest()
    for kind in ("sign_flip_at_floor", "scaled"):
        view = server_view(sent(updates, direction, Attack(kind, ("c03",))))
        answer = GUARDED[0].aggregate(view, {})
        assert answer.weights[3] <= 0.4
        unit = torch.from_numpy(direction)
        assert float(torch.nn.functional.cosine_similarity(answer.delta, unit, 0)) > 0.3


def progress(answer: Any, direction: np.ndarray) -> float:
    """How far the aggregate goes along the common direction; 1 without an attack."""
    return float(answer.delta.numpy() @ direction / (direction @ direction))


@pytest.mark.parametrize("strength", [3.0, 8.0, 50.0])
def test_nobody_pulls_back_by_more_than_clients_move_forward(strength: float) -> None:
    updates, direction = honest()
    attack = Attack("sign_flip_at_floor", ("c03",), strength)
    view = server_view(sent(updates, direction, attack))
    guarded = NoiseWise(guard=Guard(FLOOR, 1, clip=True)).aggregate(view, {})
    assert not guarded.refused
    assert progress(guarded, direction) > 0.55
    bare = NoiseWise(guard=Guard(FLOOR, 1)).aggregate(view, {})
    assert progress(bare, direction) < progress(guarded, direction)
    honest_alone = NoiseWise(guard=Guard(FLOOR, 1, clip=True)).aggregate(server_view(updates), {})
    assert progress(honest_alone, direction) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("strength", [2.0, 10.0])
def test_energy_of_a_clean_update_is_not_noise(strength: float) -> None:
    """A loud update without noise has the energy of noise, but not in every coordinate."""
    updates, direction = honest(signal=1.0)
    direction[: P // 3] = 0.0  # dead inputs, as at the borders of images
    view = server_view(sent(updates, direction, Attack("sign_flip", ("c03",), strength)))
    for aggregator in GUARDED:
        answer = aggregator.aggregate(view, {})
        assert answer.weights[3] == 0
        assert "coordinates" in answer.refused["c03"]
    energy_alone = float((view.updates.values[:, 3] ** 2).sum())
    assert energy_alone > FLOOR


def test_small_coordinates_are_counted_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(1000, 3)))
    whole = count_small(values, 0.3)
    assert list(whole) == [int((values[:, k].abs() <= 0.3).sum()) for k in range(3)]
    monkeypatch.setattr("noisewise.aggregation.guard._ROWS", 64)
    assert list(count_small(values, 0.3)) == list(whole)


def test_no_honest_client_is_refused() -> None:
    refused = 0
    for seed in range(60):
        updates, _ = honest(seed)
        refused += len(GUARDED[0].aggregate(server_view(updates), {}).refused)
    assert refused == 0  # of 1,200 honest updates


def test_all_refused_is_an_error_and_the_round_leaves_the_model_alone() -> None:
    with pytest.raises(NoHonestUpdateError, match="honest"):
        GUARDED[0].aggregate(server_view(np.full((P, N), 1e-6)), {})
    clients = small_clients()
    attack = Attack("zero", tuple(client.spec.id for client in clients))
    method = make_method("NoiseWise", {"guard": Guard(1e-9)})
    plans = plan_clients([c.spec for c in clients], method, rounds=2, clip_norm=1.0)
    settings = TrainingSettings(2, 0.1)
    run = simulate(Prepared(clients, plans, method, small_model(), settings, attacks=[attack]))
    assert run.status == "no_updates"
    assert run.rounds[-1].weights == {}
    assert "honest" in run.rounds[-1].dropped[clients[0].spec.id]
    assert all(spent > 0 for spent in run.rounds[-1].epsilon_spent.values())  # trained: charged


def test_a_guarded_method_bounds_updates_that_are_normalised() -> None:
    ours = make_method("NoiseWise", {"server_steps": 3}).guarded(2.0, 1)
    assert ours.aggregator.guard == Guard(2.0, 1, clip=True)
    theirs = make_method("RobustHDP").guarded(2.0, 3)
    assert theirs.aggregator.guard == Guard(2.0, 3)
    with pytest.raises(InvalidValueError, match="guarded"):
        make_method("WeiAvg").guarded(2.0, 1)


@pytest.mark.parametrize(("n", "f"), [(3, 1), (5, 2), (20, 8)])
@pytest.mark.parametrize("name", ["NoiseWise", "RobustHDP"])
def test_a_refused_update_does_not_end_the_round(name: str, n: int, f: int) -> None:
    """At the smallest federation that a policy permits; the attacker must not stop it."""
    Guard(FLOOR, f).check(n)
    updates = honest()[0][:, :n]
    updates[:, 1] = 1e-6
    options = {"server_steps": 1} if name == "NoiseWise" else {"estimator": "norm"}
    answer = (
        make_method(name, options).guarded(FLOOR, f).aggregator.aggregate(server_view(updates), {})
    )
    assert set(answer.refused) == {"c01"}
    assert answer.weights[1] == 0
    assert answer.weights.sum() == pytest.approx(1)
    assert answer.weights.max() <= max(0.4 / f, 1 / (n - 1)) + 1e-9


def test_cap_and_policy() -> None:
    assert Guard(1.0, 2).cap(20) == pytest.approx(0.2)
    Guard(1.0, 4).check(10)
    with pytest.raises(InvalidValueError, match="tolerated_attackers"):
        Guard(1.0, 5).check(10)
    plans = [
        make_plan(ClientSpec("a", 500, b, e, 1e-3), rounds=5, clip_norm=1.0)
        for b, e in ((16, 1.0), (64, 8.0), (8, 8.0))
    ]
    for normalised in (False, True):
        floor = noise_floor(plans, P, 0.1, normalised=normalised)
        energies = [plan_noise(plan, P, 0.1, normalised=normalised) for plan in plans]
        assert floor == min(energies)
    fields = [min(p.noise_multiplier for p in plans), max(p.expected_batch for p in plans)]
    unreal = replace(plans[1], noise_multiplier=fields[0], expected_batch=int(fields[1]))
    assert floor >= plan_noise(unreal, P, 0.1, normalised=True)


@pytest.mark.parametrize(
    ("kind", "clients", "strength", "field"),
    [
        ("krum", ("a",), None, "kind"), ("zero", (), None, "clients"),
        ("zero", ("a", "a"), None, "clients"), ("sybils", ("a",), None, "clients"),
        ("scaled", ("a",), -1.0, "strength"),
    ],
)  # fmt: skip
def test_bad_attacks_are_named(
    kind: str, clients: Sequence[str], strength: float | None, field: str
) -> None:
    with pytest.raises(InvalidValueError, match=field):
        Attack(kind, tuple(clients), strength)


def test_noise_of_an_attack_at_the_floor_is_exactly_that() -> None:
    update = {"c00": torch.zeros(200_000)}
    answer = attacked(update, [Attack("sign_flip_at_floor", ("c00",))], 3.0, 0, 1)["c00"]
    assert float(answer.square().sum()) == pytest.approx(3.0, rel=0.02)
    again = attacked(update, [Attack("sign_flip_at_floor", ("c00",))], 3.0, 0, 2)["c00"]
    assert abs(float(torch.dot(answer, again))) < 0.05


@pytest.mark.parametrize("kind", list(ATTACKS))
def test_every_attack_in_a_simulation(kind: str) -> None:
    clients = small_clients()
    ids = tuple(client.spec.id for client in clients)
    attack = Attack(kind, ids[:2] if kind == "sybils" else ids[:1])
    run = small_run("NoiseWise", rounds=2, clients=clients, attacks=[attack])
    assert run.status == "finished"
    record = run.rounds[-1]
    assert (ids[0] in record.dropped) == (kind == "nan")
    assert all(math.isfinite(weight) for weight in record.weights.values())
    same = small_run("NoiseWise", rounds=2, clients=clients, attacks=[attack])
    assert same.rounds == run.rounds
    if kind != "falsified_epsilon":
        assert run.rounds[-1].train_loss != small_run("NoiseWise", rounds=2).rounds[-1].train_loss


def test_an_attacker_that_is_no_client_is_named() -> None:
    with pytest.raises(InvalidValueError, match="nobody"):
        small_run(rounds=1, attacks=[Attack("zero", ("nobody",))])


def config(**changes: Any) -> ExperimentConfig:
    return load_config(
        ROOT / "configs" / "demo.toml", {"training.rounds": 2, "data.limit": 800, **changes}
    )


def test_a_policy_puts_noise_aware_methods_behind_a_guard() -> None:
    guarded = run(config(**{"policy.tolerated_attackers": 2}), MethodConfig(name="NoiseWise"))
    plain = run(config(), MethodConfig(name="NoiseWise"))
    assert max(guarded.rounds[0].weights.values()) <= 0.2 + 1e-9
    assert max(plain.rounds[0].weights.values()) > 0.2
    other = run(config(**{"policy.tolerated_attackers": 2}), "WeiAvg")
    assert other.rounds == run(config(), "WeiAvg").rounds


def test_permitted_plans_decide_floor_and_server_steps() -> None:
    permitted = [
        {"epsilon": 1.0, "delta": 1e-3, "n_examples": 100, "batch_size": 10},
        {"epsilon": 0.5, "delta": 1e-3, "n_examples": 100, "batch_size": 5},
    ]
    wanted = config(**{"policy.tolerated_attackers": 1, "policy.permitted": permitted})
    method = make_method("NoiseWise")
    specs = [ClientSpec("a", 100, 10, 1.0, 1e-3), ClientSpec("b", 100, 5, 0.5, 1e-3)]
    plans = [make_plan(s, rounds=2, clip_norm=1.0) for s in specs]
    own = [make_plan(ClientSpec("c", 100, 50, 9.0, 1e-3), rounds=2, clip_norm=1.0)] * 8
    settled, floor = under_policy(wanted, method, own, 650, 0.5)
    assert settled.server_steps == 20
    assert floor == min(plan_noise(p, 650, 0.5, normalised=True) for p in plans)
    assert settled.aggregator.guard == Guard(floor, 1, clip=True)


def test_a_policy_that_cannot_be_kept_is_named() -> None:
    with pytest.raises(InvalidValueError, match="tolerated_attackers"):
        run(config(**{"policy.tolerated_attackers": 9}), "NoiseWise")


@pytest.mark.parametrize(
    "attacks", [[{"kind": "krum", "clients": ["client-00"]}], [{"kind": "zero", "clients": []}]]
)
def test_bad_attacks_in_a_config_are_named(attacks: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidValueError, match="attacks"):
        config(attacks=attacks)


class TestStudy:
    """All attacks against all methods: `noisewise attacks`."""

    TWO = (
        MethodConfig(name="RobustHDP", options={"estimator": "norm"}),
        MethodConfig(name="RobustHDP", options={"estimator": "norm", "smooth": 1}),
    )

    def runs(
        self,
        attackers: Sequence[str] = ("client-00", "client-01"),
        methods: Sequence[MethodConfig] = (MethodConfig(name="DPFedAvg"),),
        attacks: Sequence[str] | None = ("zero",),
        **changes: Any,
    ) -> tuple[AttackRun, ...]:
        setup = prepare_seed(config(**changes), 0)
        return attack_runs(setup, attackers, methods=methods, attacks=attacks)

    def trained(self, runs: Sequence[AttackRun], folder: Path) -> list[tuple[AttackRun, RunResult]]:
        return list(train_runs(runs, folder / "runs", prepare_seed(config(), 0)))

    def test_options_of_one_method_stay_apart(self, tmp_path: Path) -> None:
        runs = self.runs(methods=self.TWO)
        labels = list(dict.fromkeys(run.label for run in runs))
        assert labels == [
            "RobustHDP(estimator=norm)", "RobustHDP(estimator=norm) + guard",
            "RobustHDP(estimator=norm, smooth=1)", "RobustHDP(estimator=norm, smooth=1) + guard",
        ]  # fmt: skip
        outcomes = self.trained(runs, tmp_path)
        rows = attack_rows(outcomes)
        assert [(row.method, row.attack) for row in rows] == [
            (label, attack) for attack in ("no attack", "zero") for label in labels
        ]
        alone = {a.label: r.rounds[-1].mean_accuracy for a, r in outcomes if a.attack != "zero"}
        assert all(row.without_attack == alone[row.method] for row in rows)
        figure = attack_figure(rows)
        shown = [label.get_text() for label in figure.axes[1].get_yticklabels()]
        assert shown == labels
        assert len(figure.axes[1].texts) == 8
        lines = attack_text(rows).splitlines()
        assert len({line.index("%") for line in lines[1:]}) == 1

    def test_attackers_together(self) -> None:
        three = ("client-00", "client-01", "client-02")
        demo = prepare_seed(config(**{"policy.tolerated_attackers": 1}), 0)
        methods = [MethodConfig(name="NoiseWise")]
        for together, n in ((False, 1), (True, 3)):
            runs = attack_runs(
                demo, three, methods=methods, attacks=["antisign"], together=together
            )
            assert [len(run.attackers) for run in runs if run.attack == "antisign"] == [n, n]
            assert runs[-1].config.policy.tolerated_attackers == n
            assert runs[-1].config.attacks[0].clients == list(three[:n])

    def test_folders_distinguish_runs_and_studies(self) -> None:
        many = [f"client-0{k}" for k in range(10)]
        studies = [
            self.runs(methods=self.TWO, attacks=None),
            self.runs(("client-01", "client-02"), self.TWO, None),
            self.runs(many, self.TWO, None),
            self.runs(many[::-1], self.TWO, None),
        ]
        for runs in studies:
            assert len({run.folder_name for run in runs}) == len(runs)
        hostile = [r.folder_name for runs in studies for r in runs if r.attack != "no attack"]
        single = [c.folder_name for c in studies[2] if c.attack not in ("no attack", "sybils")]
        assert len(set(hostile)) == len(hostile) - len(single)  # client-00 alone, in two of them
        quiet = [{c.folder_name for c in s if c.attack == "no attack"} for s in studies]
        assert all(names == quiet[0] for names in quiet)
        assert max(map(len, hostile)) < 150

    def test_other_attackers_use_the_same_folder(self, tmp_path: Path) -> None:
        first = self.trained(self.runs(), tmp_path)
        second = self.trained(self.runs(["client-01"]), tmp_path)
        assert first[0][1].rounds == second[0][1].rounds
        assert first[1][1].rounds != second[1][1].rounds

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("attackers", (), "one or more"),
            ("attackers", ("client-00", "client-00"), "twice"),
            ("attackers", ("client-00", "client-99"), "client-99.*among the clients client-00 to"),
            ("methods", (), "one or more"),
            ("methods", (MethodConfig(name="PFA"), MethodConfig(name="PFA")), "twice"),
            ("attacks", (), "one or more"),
            ("attacks", ("zero", "scaled", "zero"), "twice"),
            ("attacks", ("krum",), "must be one of"),
            ("attacks", ("zer",), "did you mean zero"),
        ],
    )
    def test_bad_lists_are_named_before_anything_runs(
        self, field: str, value: Any, words: str
    ) -> None:
        with pytest.raises(InvalidValueError, match=words) as error:
            self.runs(**{field: value})
        assert error.value.field == field

    @pytest.mark.parametrize("option", ["--attackers", "--methods", "--attacks"])
    def test_an_empty_option_is_named(self, option: str, tmp_path: Path) -> None:
        demo = str(ROOT / "configs" / "demo.toml")
        words = ["attacks", demo, option, " , ", "-o", str(tmp_path / "out")]
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, InvalidValueError)
        assert error.field == option
        assert not (tmp_path / "out").exists()

    def test_reports_tell_attacks_and_guards_apart(self, tmp_path: Path) -> None:
        methods = (MethodConfig(name="NoiseWise"), MethodConfig(name="DPFedAvg"))
        runs = self.runs(methods=methods, attacks=["zero", "scaled"])
        self.trained(runs, tmp_path)
        for one in runs:
            written = load_config(tmp_path / "runs" / one.folder_name / "config.toml")
            assert written.attacks == one.config.attacks
            assert written.policy == one.config.policy
        sets = find_runs([tmp_path]).sets
        assert len(sets) == 6  # two attacks and none, each with a guard and without
        assert {len(one.results) for one in sets} == {1, 2}
        for one in sets:
            assert set(one.settings) == {"attacks", "policy.tolerated_attackers"}
        names = " ".join(one.name for one in sets)
        assert names.count('"kind": "zero", "clients": ["client-00"]') == 2
        assert names.count("policy.tolerated_attackers = 1") == 3

    def test_a_folder_of_other_settings_is_refused_before_anything_runs(
        self, tmp_path: Path
    ) -> None:
        self.trained(self.runs(), tmp_path)
        there = sorted(tmp_path.rglob("config.toml"))
        before = [file.read_bytes() for file in there]
        played: list[int] = []
        methods = [MethodConfig(name="DPFedAvg")]
        attacks = ["scaled", "zero"]
        with pytest.raises(InvalidValueError, match=r"training\.clip_norm = 1\.0"):
            study_attacks(
                config(), ["client-00"], methods=methods, attacks=attacks, folder=tmp_path,
                set={"training.clip_norm": 2.0}, on_run=lambda number, *_: played.append(number),
            )  # fmt: skip
        assert not played
        assert [file.read_bytes() for file in there] == before

    def test_one_call_in_memory_and_its_files(self, tmp_path: Path) -> None:
        """An attack may change what clients report; the records are split once all the same."""
        announced: list[str] = []
        study = study_attacks(
            config(),
            ["client-00"],
            methods=["WeiAvg", "DPFedAvg"],
            attacks=["falsified_epsilon"],
            on_run=lambda number, total, run: announced.append(f"{number}/{total} {run.label}"),
        )
        assert announced == ["1/4 WeiAvg", "2/4 DPFedAvg", "3/4 WeiAvg", "4/4 DPFedAvg"]
        quiet, _, lied_to, _ = study.rows
        assert lied_to.weight > quiet.weight
        picture, *files = study.write_report(tmp_path)
        assert picture == tmp_path / "figures" / "attacks.png"
        assert all(path.exists() for path in files)
