"""The command line in real processes: output, exit codes and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import numpy as np
import pytest
from command import Noisewise
from rich.text import Text
from safetensors.numpy import load_file, save_file
from typer.main import get_command

from noisewise.cli import app
from noisewise.experiments import comparison, runner
from noisewise.experiments.config import dump_config, load_config

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.toml"
SMALL = ["--set", "training.rounds=2", "--set", "data.clients=4",
         "--set", "population.epsilon=[1.0,4.0,20.0,20.0]"]  # fmt: skip


def test_the_installed_command_is_that_entry_point() -> None:
    words = [sys.executable, "-m", "noisewise.cli", "plan", "--epsilon", "0", "--examples", "9",
             "--batch-size", "3", "--rounds", "2"]  # fmt: skip
    out = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert out.returncode == 2
    assert out.stderr.startswith("noisewise: client this-site: epsilon = 0.0")
    assert metadata.entry_points(group="console_scripts", name="noisewise")["noisewise"].value == (
        "noisewise.cli:main"
    )


def test_plan_json_has_the_promised_keys(noisewise: Noisewise) -> None:
    out = noisewise("plan", "--epsilon", 0.5, "--delta", 1e-4, "--examples", 2400,
                    "--batch-size", 32, "--rounds", 200, "--local-epochs", 1, "--clip", 3,
                    "--accountant", "pld", "--json")  # fmt: skip
    answer = json.loads(out.stdout)
    assert answer["noise_multiplier"] == pytest.approx(9.67, rel=5e-3)
    assert answer["sample_rate"] == 32 / 2400
    assert answer["steps_per_round"] == 75
    assert 0.495 <= answer["epsilon"] <= 0.5


def test_plan_for_people(noisewise: Noisewise) -> None:
    out = noisewise("plan", "--epsilon", 2, "--examples", 100, "--batch-size", 10, "--rounds", 5)
    assert out.returncode == 0
    for word in ("noise multiplier", "sample rate", "steps per round", "epsilon", "sigma^2"):
        assert word in out.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "--epsilon", -1, "--examples", 10, "--batch-size", 3, "--rounds", 2], "epsilon"),
        (["plan", "--epsilon", 1, "--examples", 9, "--batch-size", 30, "--rounds", 2], "at most"),
        (["plan", "--epsilon", 1, "--examples", 0, "--batch-size", 1, "--rounds", 2], "n_examples"),
        (["plan", "--epsilon", "inf", "--examples", 9, "--batch-size", 3, "--rounds", 2], "finite"),
        (["plan", "--epsilon", 1, "--examples", 9, "--batch-size", 3, "--rounds", 2,
          "--accountant", "x"], "accountant"),
        (["run", "nowhere.toml"], "nowhere.toml"),
        (["compare", DEMO, "--methods", "Nonsense"], "Nonsense"),
        (["compare", DEMO, "--set", "training.rounds=0"], "training.rounds"),
        (["compare", DEMO, "--set", "rounds"], "KEY=VALUE"),
        (["estimate", "nowhere.npz"], "nowhere.npz"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[object], expected: str, noisewise: Noisewise
) -> None:
    out = noisewise(*words)
    assert out.returncode == 2
    assert expected in out.stderr
    assert "Traceback" not in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1


def test_below_the_moments_floor_is_an_error_with_advice(noisewise: Noisewise) -> None:
    out = noisewise("plan", "--epsilon", 0.1, "--examples", 2400, "--batch-size", 32,
                    "--rounds", 200, "--accountant", "moments")  # fmt: skip
    assert out.returncode == 1
    assert "floor" in out.stderr
    assert "pld" in out.stderr


def test_methods_says_what_each_server_is_told(noisewise: Noisewise) -> None:
    rows = {row["method"]: row for row in json.loads(noisewise("methods", "--json").stdout)}
    assert rows["RobustHDP"]["needs"] == []
    assert rows["WeiAvg"]["needs"] == ["epsilon"]
    assert rows["Oracle"]["needs"] == ["true_variance"]
    assert not rows["FedAvg"]["private"]


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("estimator", ["pcp", "factor", "norm", "own_parts:Guess"])
def test_estimate(kind: str, estimator: str, tmp_path: Path, noisewise: Noisewise) -> None:
    rng = np.random.default_rng(0)
    scale = np.array([1.0, 2.0, 4.0])
    updates = (0.1 * rng.normal(size=(2000, 1)) + scale * rng.normal(size=(2000, 3))).astype("f4")
    path = tmp_path / f"updates.{kind}"
    np.savez(path, updates=updates) if kind == "npz" else save_file({"updates": updates}, path)
    out = noisewise("estimate", path, "--estimator", estimator, "--json")
    answer = json.loads(out.stdout)
    assert sum(answer["weights"]) == pytest.approx(1)
    assert answer["converged"] is True
    assert np.argsort(answer["variance"]).tolist() == [0, 1, 2]
    assert len(noisewise("estimate", path, "--estimator", estimator).stdout.splitlines()) == 4


def test_estimate_from_one_file_for_each_client(tmp_path: Path, noisewise: Noisewise) -> None:
    rng = np.random.default_rng(0)
    files = [tmp_path / f"site-{name}.safetensors" for name in "abc"]
    for file, scale in zip(files, (4.0, 1.0, 0.0), strict=True):
        save_file({"delta": scale * rng.normal(size=3000)}, file)
    answer = json.loads(noisewise("estimate", *files, "--estimator", "factor", "--json").stdout)
    assert answer["clients"] == ["site-a", "site-b", "site-c"]
    assert answer["variance"] == pytest.approx([48_000, 3000, 0], rel=0.1)
    assert answer["weights"][2] == 0  # zeros carry nothing, whatever their variance
    assert answer["weights"][1] == pytest.approx(16 / 17, rel=0.02)
    table = noisewise("estimate", tmp_path, "--estimator", "norm").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["client", "site-a", "site-b", "site-c"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"other": np.zeros((3, 2))}, "array named updates"),
        ({"updates": np.zeros(3)}, "p x n"),
        ({"updates": np.full((4, 2), np.nan)}, "finite"),
        ({"updates": np.array([[object()]])}, "never loaded"),
    ],
)
def test_estimate_refuses_bad_files(
    arrays: dict[str, np.ndarray], words: str, tmp_path: Path, noisewise: Noisewise
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)  # type: ignore[arg-type]
    out = noisewise("estimate", tmp_path / "bad.npz")
    assert out.returncode in (1, 2)
    assert words in out.stderr
    assert "Traceback" not in out.stderr


def test_run_twice_reads_the_finished_run(tmp_path: Path, noisewise: Noisewise) -> None:
    words = ["run", DEMO, *SMALL, "--output", tmp_path, "--workers", 1]
    first = noisewise(*words)
    assert first.returncode == 0, first.stderr
    assert "RobustHDP" in first.stdout
    folder = tmp_path / "RobustHDP-seed0"
    assert {p.name for p in folder.iterdir()} >= {"config.toml", "result.json", "rounds.jsonl"}
    stamp = (folder / "result.json").stat().st_mtime_ns
    assert noisewise(*words).stdout == first.stdout
    assert (folder / "result.json").stat().st_mtime_ns == stamp
    # The config that it wrote gives the same run again.
    again = noisewise("run", folder / "config.toml", "--output", tmp_path / "again")
    assert again.stdout.splitlines()[:3] == first.stdout.splitlines()[:3]
    other = noisewise(*words, "--set", "training.learning_rate=0.7")
    assert other.returncode == 2
    assert "other settings" in other.stderr


def test_compare_writes_tables_and_figures(tmp_path: Path, noisewise: Noisewise) -> None:
    out = noisewise("compare", DEMO, *SMALL, "--methods", "RobustHDP,DPFedAvg,own_parts:Median",
                    "--seeds", 2, "--output", tmp_path, "--workers", 2)  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert "own_parts:Median" in out.stdout
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")}
    for figure in ("accuracy", "noise", "weights", "budgets"):
        assert {f"figures/{figure}.{kind}" for kind in ("png", "svg", "pdf")} <= names
    assert {"config.toml", "report.html", "report.md", "table.csv", "summary.json"} <= names
    assert f"Page: {tmp_path / 'report.html'}" in out.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["seeds"] for row in summary["rows"]] == [2, 2, 2]
    plain = out.stdout + out.stderr
    assert "\x1b" not in plain  # no colours, no bars where there is no terminal


def test_own_model_loss_metric_dataset_estimator_from_a_config(
    tmp_path: Path, noisewise: Noisewise
) -> None:
    (tmp_path / "own.toml").write_text(
        """
[data]
name = "own_parts:blobs"
clients = 3
[population]
epsilon = 5.0
batch_size = 8
delta = 1e-3
[model]
name = "own_parts:tiny"
options = { width = 3 }
[training]
rounds = 2
learning_rate = 0.1
clip_norm = 1.0
loss = "own_parts:squared"
metric = "own_parts:closeness"
[method]
name = "RobustHDP"
options = { estimator = "own_parts:Guess" }
"""
    )
    out = noisewise("run", "own.toml", "--json", folder=tmp_path)
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["method"] == "RobustHDP(estimator=own_parts:Guess)"


@pytest.mark.parametrize("workers", [1, 2])
def test_one_failing_method_does_not_take_the_others_along(
    tmp_path: Path, noisewise: Noisewise, workers: int
) -> None:
    out = noisewise("compare", DEMO, *SMALL, "--methods", "failing_part:Failing,DPFedAvg",
                    "--seeds", 1, "--output", tmp_path, "--workers", workers)  # fmt: skip
    assert out.returncode == 1
    assert "failing_part" in out.stderr
    assert "on purpose" in out.stderr
    assert "DPFedAvg" in out.stdout


def test_help_has_examples(noisewise: Noisewise) -> None:
    for command in ("run", "compare", "plan", "estimate", "report"):
        assert f"noisewise {command}" in noisewise(command, "--help").stdout
    assert noisewise("--version").stdout.startswith("noisewise ")


def test_population_prints_and_draws(noisewise: Noisewise, tmp_path: Path) -> None:
    out = noisewise("population", DEMO, "--output", tmp_path)
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert lines[0].split()[:6] == ["client", "N", "b", "steps", "epsilon", "z"]
    assert lines[1].startswith("client-00")
    assert (tmp_path / "population.png").stat().st_size > 10_000
    assert (tmp_path / "population.svg").exists()
    rows = json.loads(noisewise("population", DEMO, "--json").stdout)
    assert sum(row["oracle_weight"] for row in rows) == pytest.approx(1)


def test_data_commands(
    noisewise: Noisewise, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOISEWISE_CACHE", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(noisewise("data", "list", "--json").stdout)}
    assert rows["digits"]["state"] == "built in"
    assert rows["cifar10"]["n_train"] == 50_000
    assert "mnist" in noisewise("data", "list").stdout
    assert noisewise("data", "get", "digits").returncode == 0
    assert noisewise("data", "verify", "digits").stdout == "digits: ok\n"
    missing = noisewise("data", "verify", "mnist")
    assert missing.returncode == 1
    assert "mnist" in missing.stderr
    unknown = noisewise("data", "get", "nonsense")
    assert unknown.returncode == 2
    assert "digits" in unknown.stderr


def test_updates_of_a_first_round_and_figures_of_their_noise(
    noisewise: Noisewise, tmp_path: Path
) -> None:
    stored = tmp_path / "updates.safetensors"
    out = noisewise("updates", DEMO, "--output", stored, "--workers", 1)
    assert out.returncode == 0, out.stderr
    assert "650 x 16" in out.stdout
    answer = noisewise("estimate", stored, "--figures", tmp_path / "figures", "--json")
    assert answer.returncode == 0, answer.stderr
    weights = json.loads(answer.stdout)["weights"]
    truth = 1 / load_file(stored)["true_variance"]
    assert np.abs(weights - truth / truth.sum()).sum() < 0.2
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {f"{n}.png" for n in ("spectrum", "truth", "weights", "sample")} <= names
    bad = noisewise("updates", DEMO, "--output", tmp_path / "updates.txt")
    assert bad.returncode == 2
    assert "safetensors" in bad.stderr


def test_attacks_print_draw_and_resume(noisewise: Noisewise, tmp_path: Path) -> None:
    words = ["attacks", DEMO, "--set", "training.rounds=2", "--methods", "NoiseWise,DPFedAvg",
             "--attacks", "zero,sybils", "--workers", 1, "--output", tmp_path]  # fmt: skip
    out = noisewise(*words)
    assert out.returncode == 0, out.stderr
    assert "NoiseWise + guard" in out.stdout
    assert (tmp_path / "figures" / "attacks.png").stat().st_size > 10_000
    rows = json.loads(noisewise(*words, "--json").stdout)
    assert len(rows) == 3 * 3
    assert all(
        row["weight"] == 0 for row in rows if row["attack"] == "zero" and "guard" in row["method"]
    )


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--attacks", "krum", "attacks"), ("--attackers", "client-00", "attackers"),
        ("--attackers", "nobody,none", "clients"),
    ],
)  # fmt: skip
def test_bad_attacks_are_one_line(
    noisewise: Noisewise, tmp_path: Path, option: str, value: str, field: str
) -> None:
    out = noisewise("attacks", DEMO, "--set", "training.rounds=1", "--methods", "DPFedAvg",
                    "--output", tmp_path, option, value)  # fmt: skip
    assert out.returncode == 2, out.stderr
    assert field in out.stderr.strip().splitlines()[-1]
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], "A TOML config"),
        (["report"], "Folders of runs"),
        (["reproduce"], "default: list all of them"),
        (["data", "get"], "noisewise data list"),
    ],
)
def test_help_explains_arguments(words: list[str], expected: str, noisewise: Noisewise) -> None:
    """click 8.5 drops these texts under the typer that we use."""
    assert expected in " ".join(noisewise(*words, "--help").stdout.replace("│", "").split())


def help_texts(command: click.Command) -> Iterator[str]:
    """The help texts of a command, its parameters and its subcommands."""
    yield command.help or ""
    for parameter in command.params:
        yield getattr(parameter, "help", None) or ""
    for part in getattr(command, "commands", {}).values():
        yield from help_texts(part)


def test_rich_drops_no_word_of_a_help_text() -> None:
    """rich takes a word in square brackets for a style and leaves it out."""
    texts = list(help_texts(get_command(app)))
    assert len(texts) > 100
    assert [text for text in texts if Text.from_markup(text).plain != text] == []
    assert Text.from_markup("print [features]").plain == "print "


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["compare", DEMO, "--methods", " , "], 2, "--methods = ' , ': must be one or more names"),
        (["reproduce", "noise-table", "--dists", ""], 2, "--dists = '': must be one or more"),
        (["run", DEMO, "--set", "training.rounds=1,2"], 2, "only `compare` sweeps several"),
        (["run", DEMO, "--output", "taken/x"], 2, "must be a folder, and taken is a file"),
        (["compare", DEMO, "--output", "taken"], 2, "must be a folder, and taken is a file"),
        (
            ["compare", DEMO, "--set", "training.clip_norm=1.0,2.0", "--output", "taken"],
            2,
            "must be a folder, and taken is a file",
        ),
        (["compare", DEMO, "--set", "model.name=nosuch"], 2, "model = 'nosuch'"),
        (["compare", DEMO, "--output", "other"], 2, "contains runs of 1 round,"),
        (
            ["compare", DEMO, "--output", "mine"],
            2,
            "contains a config.toml that was not written by a comparison",
        ),
        (
            ["compare", "mine/config.toml", "--output", "mine", "--set", "training.rounds=2"],
            2,
            "contains a config.toml that was not written by a comparison",
        ),
        (["population", DEMO, "--output", "taken"], 1, "taken: File exists"),
        (["reproduce", "noise-table", "--output", "taken"], 1, "taken: File exists"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: list[str],
    code: int,
    said: str,
    noisewise: Noisewise,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    changed = dump_config(load_config(DEMO, {"training.rounds": 1}))
    (tmp_path / "other" / "runs" / "RobustHDP-seed0").mkdir(parents=True)
    (tmp_path / "other" / "runs" / "RobustHDP-seed0" / "run.json").touch()
    (tmp_path / "other" / "config.toml").write_text(changed)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_bytes(DEMO.read_bytes())
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for module in (comparison, runner):
        monkeypatch.setattr(module, "prepare", lambda *_, **__: pytest.fail("has planned first"))
    out = noisewise(*words, folder=tmp_path)
    assert before == {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert out.returncode == code
    assert out.stderr.startswith("noisewise: ")
    assert said in out.stderr
    assert out.stderr.count("\n") == 1


def test_population_says_what_its_columns_mean(noisewise: Noisewise) -> None:
    out = noisewise("population", DEMO, *SMALL).stdout
    head, legend = out.splitlines()[0].split(), out.partition("\n\n")[2]
    for column in head[1:]:
        assert column in legend or column == "epsilon"
