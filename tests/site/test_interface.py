"""The interface of a site without transport: requests, and answers or refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from site_cases import METRICS, make_site

from noisewise.errors import InvalidValueError, UpdateError
from noisewise.privacy.declaration import Declaration
from noisewise.privacy.ledger import Ledger, Statement, read_refusals
from noisewise.site import interface
from noisewise.site.instruction import check_instruction
from noisewise.site.interface import answer_declaration, answer_instruction, answer_question
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_config import LimitsPart
from noisewise.site.site_file import load_site
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout

Arrays = dict[str, NDArray[np.float32]]
MODEL = make_model("softmax", (1, 8, 8), 10, seed=0)
LAYOUT = ParameterLayout.of(MODEL)
LIMITS = LimitsPart(learning_rate=[0.01, 1.0], last_round=1000)


def arrays() -> Arrays:
    return {name: part.detach().numpy() for name, part in MODEL.named_parameters()}


def instruct(site: Path, number: object = 1, rate: object = 0.2, **more: Any) -> Arrays | None:
    asked = Instruction(number, rate, more.pop("parameters", arrays()))
    return answer_instruction(lambda: site, lambda: asked, number)


def statement(site: Path) -> Statement:
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        return ledger.statement()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site", records=60)


def test_an_instruction_returns_a_noised_update_and_the_same_one_again(site: Path) -> None:
    update = instruct(site)
    assert update is not None
    assert {name: (one.shape, one.dtype.str) for name, one in update.items()} == {
        name: (one.shape, "<f4") for name, one in arrays().items()
    }
    again = instruct(site)
    assert again is not None
    assert all(np.array_equal(update[name], again[name]) for name in update)
    other = instruct(site, 2)
    assert other is not None
    assert not np.array_equal(update["1.weight"], other["1.weight"])
    assert [entry.state for entry in statement(site).entries] == ["sealed", "sealed"]


def test_a_question_returns_a_noised_accuracy_if_the_site_opted_in(site: Path) -> None:
    def ask() -> float | None:
        return answer_question(lambda: site, lambda: Question(1, arrays()), 1)

    assert ask() is None
    text = site.read_text().replace("[model]", 'held_out = "records.npz"\n\n[model]')
    site.write_text(text + METRICS.format(noise=5.0, records=60, releases=2))
    accuracy = ask()
    assert type(accuracy) is float
    assert ask() == accuracy
    assert [entry.purpose for entry in statement(site).entries] == ["metrics"]


def test_a_declaration_is_returned_if_the_site_opted_in(site: Path) -> None:
    assert answer_declaration(lambda: site) is None
    site.write_text(site.read_text() + "\n[declaration]\npublish = true\n")
    assert answer_declaration(lambda: site) == Declaration("record", 8.0, 1e-3)
    assert statement(site).entries == ()


BAD_VALUES: dict[str, dict[str, Any]] = {
    "round 0": {"number": 0},
    "round above the limit": {"number": 1001},
    "round of another type": {"number": 1.0},
    "round true": {"number": True},
    "round as text": {"number": "1" * 10_000},
    "rate too low": {"rate": 1e-9},
    "rate too high": {"rate": 1.5},
    "rate nan": {"rate": float("nan")},
    "rate of another type": {"rate": 1},
    "rate as numpy": {"rate": np.float64(0.2)},
    "no parameters": {"parameters": {}},
    "other names": {"parameters": {"\x1b" * 10_000: arrays()["1.bias"]}},
    "other shape": {"parameters": arrays() | {"1.bias": np.zeros((2, 5), np.float32)}},
    "other type": {"parameters": arrays() | {"1.bias": np.zeros(10)}},
    "big-endian": {"parameters": arrays() | {"1.bias": np.zeros(10, ">f4")}},
    "list": {"parameters": arrays() | {"1.bias": [0.0] * 10}},
    "nan": {"parameters": arrays() | {"1.bias": np.full(10, np.nan, np.float32)}},
    "infinite": {"parameters": arrays() | {"1.bias": np.full(10, np.inf, np.float32)}},
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_values_outside_of_the_limits_are_refused(case: str) -> None:
    values = {"number": 1, "rate": 0.2, "parameters": arrays()} | BAD_VALUES[case]
    asked = Instruction(values["number"], values["rate"], values["parameters"])
    with pytest.raises((InvalidValueError, UpdateError)) as caught:
        check_instruction(asked, LAYOUT, LIMITS)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_sound_values_pass_and_are_copied() -> None:
    given = arrays()
    given["1.weight"] = np.asfortranarray(given["1.weight"])
    checked = check_instruction(Instruction(7, 0.5, given), LAYOUT, LIMITS)
    assert (checked.round, checked.learning_rate) == (7, 0.5)
    assert np.array_equal(checked.theta.numpy(), LAYOUT.flatten(MODEL).numpy())
    before = checked.theta.clone()
    given["1.weight"][:] = 9.0
    assert checked.theta.equal(before)


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


class RudeError(Exception):
    """Raises again where its text is asked for."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = [
    InvalidValueError("x", "secret", "no"), UpdateError("secret"), ValueError("secret"), OSError(5),
    MemoryError(), RecursionError(), StopIteration(), KeyError("x"), AssertionError(), RudeError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), ExceptionGroup("several", [ValueError()]),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", ["find_file", "read", "train"])
def test_no_exception_leaves_and_nothing_is_charged(
    error: Exception, stage: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, the answer is None."""
    find: Callable[[], Path] = raising(error) if stage == "find_file" else lambda: site
    read = raising(error) if stage == "read" else lambda: Instruction(1, 0.2, arrays())
    if stage == "train":
        monkeypatch.setattr(interface, "noised_update", raising(error))
        monkeypatch.setattr(interface, "noised_score", raising(error))
        monkeypatch.setattr(interface, "site_declaration", raising(error))
    assert answer_instruction(find, read, 1) is None
    assert answer_question(find, read, 1) is None
    if stage != "read":
        assert answer_declaration(find) is None
    assert statement(site).entries == ()


def test_the_reason_stays_at_the_site_beside_the_ledger(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert instruct(site, 4, 100.0) is None
    assert "not taking part: learning_rate = '100.0'" in caplog.text
    (noted,) = read_refusals(site.parent / "site.ledger")
    assert (noted.round, noted.kind) == (4, "InvalidValueError")
    assert "learning_rate" in noted.reason
    broken = site.with_name("broken.toml")
    broken.write_text("[ledger")
    assert instruct(broken, 5) is None
    (noted,) = read_refusals(broken)
    assert noted.round == 5


@pytest.mark.parametrize("asked", [None, True, "7", 2.0, 2**31, -(2**70), object()])
def test_a_round_that_cannot_be_used_is_not_noted(asked: object, site: Path) -> None:
    assert answer_instruction(lambda: site, raising(UpdateError("x")), asked) is None
    (noted,) = read_refusals(site.parent / "site.ledger")
    assert noted.round is None


def test_records_are_read_before_the_ledger_is_charged(site: Path) -> None:
    (site.parent / "records.npz").unlink()
    assert instruct(site) is None
    assert statement(site).entries == ()


def test_batch_sizes_are_chosen_before_a_record_is_read(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from noisewise.site import site_file, training_round
    from noisewise.site.site_file import Site

    steps: list[str] = []

    class Engine(site_file.IsolatedGradients):
        def prepare(self, *args: Any) -> Any:
            steps.append("self-check")
            return super().prepare(*args)

    def traced(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            steps.append(name)
            return function(*args, **more)

        return call

    monkeypatch.setattr(site_file, "IsolatedGradients", Engine)
    monkeypatch.setattr(Site, "data", traced("read records", Site.data))
    monkeypatch.setattr(Ledger, "reserve", traced("reserve", Ledger.reserve))
    monkeypatch.setattr(Ledger, "seal", traced("seal", Ledger.seal))
    train = traced("train", training_round.local_update)
    monkeypatch.setattr(training_round, "local_update", train)
    assert instruct(site) is not None
    assert steps == ["self-check", "read records", "reserve", "train", "seal"]


def test_the_site_trains_with_isolated_records_and_the_systems_generator(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from noisewise.randomness import SecureRandom
    from noisewise.site import training_round
    from noisewise.training.engine import IsolatedGradients

    seen: list[tuple[object, ...]] = []
    real = training_round.local_update

    def local_update(*args: Any, **more: Any) -> Any:
        seen.append((type(args[6]), type(more["engine"]), args[3]))
        return real(*args, **more)

    monkeypatch.setattr(training_round, "local_update", local_update)
    assert instruct(site) is not None
    assert seen == [(SecureRandom, IsolatedGradients, load_site(site).plan)]
