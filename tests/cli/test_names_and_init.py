"""Names that people mistype, quick static commands, groups of commands, and `noisewise init`."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from command import Noisewise, command

from noisewise.aggregation import METHODS, make_method
from noisewise.checks import known_name, matching_name
from noisewise.data import load_dataset
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import MethodConfig, load_config
from noisewise.experiments.new_config import new_config
from noisewise.experiments.prepare import prepare
from noisewise.experiments.runner import comparison_jobs
from noisewise.noise import make_estimator
from noisewise.training import make_model


@pytest.fixture
def noisewise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Noisewise:
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # not a terminal
    return command(capsys, monkeypatch)


def help_text(columns: int, *arguments: str) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-m", "noisewise.cli", *arguments, "--help"],
        capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": str(columns)},
    )  # fmt: skip
    return answer.stdout.splitlines()


@pytest.mark.parametrize("typed", ["robusthdp", "Robust-HDP", "ROBUST_HDP", "RobustHDP"])
def test_case_and_hyphens_of_a_method_do_not_matter(typed: str) -> None:
    assert make_method(typed).name == MethodConfig(name=typed).name == "RobustHDP"


def test_other_names_are_matched_too() -> None:
    assert load_dataset("Digits").name == "digits"
    assert make_estimator("Factor").name == make_estimator("factor").name
    assert make_model("Soft_Max", (1, 8, 8), 10, 0)
    assert matching_name("fashion_mnist", ["mnist", "fashion-mnist"]) == "fashion-mnist"


@pytest.mark.parametrize(
    ("typed", "meant"), [("RobustHPD", "RobustHDP"), ("noisewize", "NoiseWise")]
)
def test_a_misspelt_method_is_answered_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(InvalidValueError, match=f"'{typed}': did you mean {meant}\\?"):
        make_method(typed)


CONFIG = Path(__file__).parents[2] / "configs" / "demo.toml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.ronds": 5}, r"training\.ronds = 5: unknown key, did you mean rounds\?"),
        ({"trainign": {"rounds": 5}}, r"trainign = .*: unknown key, did you mean training\?"),
        ({"training.accountant": "pdl"}, r"training\.accountant = 'pdl': did you mean pld\?"),
        ({"task.name": "clasification"}, r"task\.name = 'clasification': did you mean class"),
        ({"data.partition": "quantitty"}, r"data\.partition = 'quantitty': did you mean quantity"),
        ({"population.unit": "persn"}, r"population\.unit = 'persn': did you mean person"),
        ({"training.executor": "procesess"}, r"training\.executor .* did you mean processes"),
        ({"task.nmae": "binary"}, r"task\.nmae = 'binary': unknown key, did you mean name"),
        ({"zzz": 1}, r"zzz = 1: unknown key, must be one of"),
    ],
)  # fmt: skip
def test_misspelt_keys_and_values_of_a_config(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        prepare(load_config(CONFIG, overrides))


def test_a_misspelt_config_file(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("")
    with pytest.raises(InvalidValueError, match=r"dmeo\.toml': did you mean demo\.toml\? It must"):
        load_config(tmp_path / "dmeo.toml")
    with pytest.raises(InvalidValueError, match=r"experiments\.cfg': must be a file"):
        load_config(tmp_path / "experiments.cfg")


@pytest.mark.parametrize(
    "arguments", [["flower", "status", "none"], ["flower", "check", "none"], ["estimate", "none"]]
)
def test_a_missing_file_is_one_plain_line(arguments: list[str], noisewise: Noisewise) -> None:
    answer = noisewise(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "'none'" in answer.stderr
    assert "Errno" not in answer.stderr
    assert "Error" not in answer.stderr


def test_a_folder_without_a_run_is_one_plain_line(noisewise: Noisewise, tmp_path: Path) -> None:
    answer = noisewise("flower", "status", str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.endswith("must hold a run: it has no result.json and no run.json\n")


def test_a_name_unlike_all_others_gets_no_suggestion() -> None:
    with pytest.raises(InvalidValueError, match=r"= 'xyz': must be one of mnist, cifar10$"):
        known_name("dataset", "xyz", ["mnist", "cifar10"])


def test_names_that_differ_only_in_spelling_do_not_exist() -> None:
    """Otherwise a spelling could mean another method than the one that is listed."""
    spellings = [name.casefold().replace("_", "").replace("-", "") for name in METHODS]
    assert len(set(spellings)) == len(METHODS)


def test_a_misspelt_dataset_ends_in_one_line(noisewise: Noisewise) -> None:
    answer = noisewise("data", "get", "digits", "mnsit")
    assert answer.returncode == 2
    assert answer.stdout == ""  # all names are checked before anything is downloaded
    assert answer.stderr.startswith("noisewise: dataset = 'mnsit': did you mean mnist?")


def test_data_get_takes_several_names(noisewise: Noisewise) -> None:
    answer = noisewise("data", "get", "digits", "DIGITS")
    assert answer.stdout.count("digits: ") == 2
    assert noisewise("data", "get", "digits", "mnist", "--folder", ".").returncode == 2


@pytest.mark.parametrize("name", METHODS)
def test_facts_of_a_method_are_those_of_its_aggregator(name: str) -> None:
    method = make_method(name)
    assert frozenset(METHODS[name].needs) == method.needs
    assert METHODS[name].private == method.private
    assert METHODS[name].shares_model == method.shares_model


@pytest.mark.parametrize("arguments", [["--help"], ["methods"], ["reproduce", "--help"]])
def test_static_commands_do_not_import_torch(arguments: list[str]) -> None:
    call = f"try: c.app({arguments!r})\nfinally: assert 'torch' not in sys.modules"
    code = f"import sys, noisewise.cli as c\n{call}"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_a_mistyped_command_is_answered_once(noisewise: Noisewise) -> None:
    assert noisewise("compar").stderr.count("Did you mean") == 1


def test_every_command_is_in_a_group_and_completion_is_offered() -> None:
    listed = "\n".join(help_text(100))
    assert "─ Commands ─" not in listed
    titles = ["Train and compare", "Data and estimates", "A site and", "A server of", "The paper"]
    places = [listed.index(f"─ {title}") for title in titles]
    assert places == sorted(places)
    assert "--install-completion" in listed


@pytest.mark.parametrize("command", [(), ("compare",), ("attacks",), ("ledger", "init")])
def test_help_is_readable_in_60_columns(command: tuple[str, ...]) -> None:
    lines = help_text(60, *command)
    assert max(map(len, lines)) <= 60
    assert not [line for line in lines if "…" in line]


def test_methods_are_readable_in_60_columns(
    noisewise: Noisewise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = noisewise("methods").stdout
    assert max(map(len, narrow.splitlines())) <= 60
    monkeypatch.delenv("COLUMNS")
    wide = noisewise("methods").stdout  # not a terminal: one line for each method
    assert len(wide.splitlines()) == len(METHODS) + 1
    assert len(narrow.splitlines()) > len(METHODS) + 1
    assert narrow.split() == wide.split()


@pytest.mark.parametrize(
    ("options", "clients"),
    [
        (["--data", "digits", "--clients", "4"], 4),
        (["--data", "Digits", "--clients", "3", "--epsilon", "0.5,1,8"], 3),
        ([], 10),
    ],
)
def test_init_writes_a_config_that_runs(
    noisewise: Noisewise, tmp_path: Path, options: list[str], clients: int
) -> None:
    file = tmp_path / "new.toml"
    answer = noisewise("init", str(file), "--rounds", "2", *options)
    assert answer.returncode == 0, answer.stderr
    assert len(prepare(file).clients) == clients
    assert load_config(file).training.rounds == 2


def test_init_takes_a_folder_of_csv_files(noisewise: Noisewise, tmp_path: Path) -> None:
    folder = tmp_path / "wards"
    folder.mkdir()
    for ward in "abc":
        rows = "".join(f"{k},{9 - k},{'yes' if k % 2 else 'no'}\n" for k in range(10))
        (folder / f"{ward}.csv").write_text("age,dose,ill\n" + rows)
    file = tmp_path / "wards.toml"
    answer = noisewise(
        "init", str(file), "--data", str(folder), "--target", "ill", "--classes", "no,yes",
        "--epsilon", "1,2,8",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert [client.spec.epsilon for client in prepare(file).clients] == [1, 2, 8]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--data", "mnsit"], "data = 'mnsit'"),
        (["--epsilon", "one"], "--epsilon = 'one'"),
        (["--epsilon", "-1"], "epsilon = -1"),
        (["--clients", "2", "--epsilon", "1,2,3"], "population.epsilon"),
        (["--target", "ill"], "--target = 'ill': is for a folder"),
        (["--classes", "no,yes"], "--classes = 'no,yes': is for a folder"),
        (["--data", "FARS", "--clients", "3"], "--clients = 3: has no effect"),
    ],
)
def test_init_rejects_bad_answers_and_writes_nothing(
    noisewise: Noisewise, tmp_path: Path, options: list[str], field: str
) -> None:
    answer = noisewise("init", str(tmp_path / "new.toml"), *options)
    assert (answer.returncode, list(tmp_path.iterdir())) == (2, [])
    assert answer.stderr.startswith(f"noisewise: {field}")
    assert answer.stderr.count("\n") == 1


def test_init_keeps_an_existing_file(noisewise: Noisewise, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("mine")
    assert noisewise("init", str(file)).returncode == 2
    assert file.read_text() == "mine"


def test_init_asks_in_a_terminal(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    file = tmp_path / "asked.toml"
    process = subprocess.Popen(
        [sys.executable, "-m", "noisewise.cli", "init", str(file)],
        stdin=child, stdout=child, stderr=child,
    )  # fmt: skip
    os.write(parent, b"digits\n7\n2\n")
    assert process.wait(60) == 0
    os.close(child)
    os.close(parent)
    config = load_config(file)
    assert (config.data.clients, config.population.epsilon) == (7, 2.0)


def test_new_config_quotes_folders_and_columns(tmp_path: Path) -> None:
    folder = tmp_path / 'ward "7"'
    folder.mkdir()
    file = tmp_path / "config.toml"
    file.write_text(new_config(str(folder), target='the "ill"'))
    data = load_config(file).data
    assert (str(data.folder), data.target) == (str(folder), 'the "ill"')


def test_a_method_that_is_listed_twice_is_named_as_it_was_given() -> None:
    with pytest.raises(InvalidValueError, match=r"compare\.methods = 'NoiseWise': is listed twice"):
        comparison_jobs(load_config(CONFIG), ["NoiseWise", "noisewise"])


def test_new_config_quotes_class_names(tmp_path: Path) -> None:
    text = new_config(str(tmp_path), classes=['a "quoted" name', "back\\slash"])
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert load_config(file).data.classes == ['a "quoted" name', "back\\slash"]
