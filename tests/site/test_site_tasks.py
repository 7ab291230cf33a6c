"""A site with another task than classification: declared forms, and one record decides alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from site_cases import SITE, make_site
from torch import nn

from noisewise.errors import InvalidValueError
from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger
from noisewise.site import noised_score, training_round
from noisewise.site.check_site import check_site
from noisewise.site.interface import answer_instruction, answer_question
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_file import load_site
from noisewise.training.bounded_scores import SCORE_UNITS
from noisewise.training.inputs import call_arguments, output_of
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout

MODELS = """
from torch import nn


class Tokens(nn.Module):
    def __init__(self, input_shape, n_classes):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.last = nn.Linear(6, n_classes)

    def forward(self, input_ids, attention_mask):
        used = attention_mask[..., None].float()
        return self.last((self.embedding(input_ids) * used).sum(1) / used.sum(1).clamp(min=1))


class NextToken(nn.Module):
    def __init__(self, input_shape, n_classes):
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 6), nn.Linear(6, n_classes)

    def forward(self, tokens):
        return self.last(self.embedding(tokens))
"""


@pytest.fixture(autouse=True)
def _own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "site_models", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def write(folder: Path, task: str, model: str, **arrays: Any) -> Path:
    """A site of 40 records with a task and a model."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "records.npz", **arrays)
    text = SITE.format(
        number=0, records=40, epsilon=8.0, rounds=3, batch=10, epochs=1, normalise="false"
    )
    old = text[text.index("[model]") : text.index("[budget]")]
    (folder / "site.toml").write_text(text.replace(old, f"{task}\n{model}\n\n"))
    Ledger.create(folder / "site.ledger", PrivacyBudget(8.0, 1e-3), "digits-0")
    return folder / "site.toml"


REGRESSION = (
    '[task]\nname = "regression"',
    '[model]\nname = "softmax"\ninput_shape = [3]\nclasses = 1',
)
LANGUAGE = (
    '[task]\nname = "language_model"\ntarget_shape = [4]',
    '[model]\nname = "site_models:NextToken"\ninput_shape = [4]\ninput_dtype = "int64"\n'
    "vocabulary = 20\nclasses = 20",
)
NAMED = (
    "",
    '[model]\nname = "site_models:Tokens"\nclasses = 2\n'
    '[model.inputs.input_ids]\nshape = [5]\ndtype = "int64"\nvocabulary = 20\n'
    '[model.inputs.attention_mask]\nshape = [5]\ndtype = "int64"\nvocabulary = 2',
)
RNG = np.random.default_rng(0)
NUMBERS = {"inputs": RNG.normal(size=(40, 3)), "targets": RNG.normal(size=40)}
TOKENS = {
    "inputs": RNG.integers(0, 20, (40, 4), dtype=np.uint8),
    "targets": RNG.integers(0, 20, (40, 4)),
}
BY_NAME = {
    "inputs.input_ids": RNG.integers(0, 20, (40, 5)),
    "inputs.attention_mask": np.ones((40, 5), np.int64),
    "targets": RNG.integers(0, 2, 40),
}
CASES = {
    "regression": (REGRESSION, NUMBERS),
    "language model": (LANGUAGE, TOKENS),
    "inputs by name": (NAMED, BY_NAME),
}


def changed(arrays: dict[str, Any], name: str, value: float, record: int = 7) -> dict[str, Any]:
    part = np.array(arrays[name], dtype=np.float64 if isinstance(value, float) else None)
    part[record] = value
    return {**arrays, name: part}


def instruct(site: Path) -> dict[str, Any] | None:
    model = load_site(site).model
    parameters = {name: part.detach().numpy() for name, part in model.named_parameters()}
    return answer_instruction(lambda: site, lambda: Instruction(1, 0.2, parameters), 1)


@pytest.mark.parametrize("name", CASES)
def test_a_site_trains_every_task(name: str, tmp_path: Path) -> None:
    form, arrays = CASES[name]
    site = write(tmp_path / "site", *form, **arrays)
    assert "Left: 3 of 3 rounds" in check_site(load_site(site))
    update = instruct(site)
    assert update is not None
    assert all(np.isfinite(part).all() for part in update.values())


def test_ids_stay_ids_and_numbers_keep_their_fractions(tmp_path: Path) -> None:
    tokens = load_site(write(tmp_path / "a", *LANGUAGE, **TOKENS)).data()
    assert tokens.tensor.dtype == torch.int64
    np.testing.assert_array_equal(tokens.tensor.numpy(), TOKENS["inputs"])
    numbers = load_site(write(tmp_path / "b", *REGRESSION, **NUMBERS)).data()
    np.testing.assert_allclose(numbers.targets.numpy(), NUMBERS["targets"], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "array", "value"),
    [
        ("regression", "targets", float("nan")),
        ("regression", "targets", 1e39),
        ("regression", "inputs", float("inf")),
        ("language model", "inputs", 20),  # beyond the vocabulary
        ("language model", "targets", -1),
        ("language model", "targets", -100),  # no place counts
        ("language model", "targets", 0.5),
        ("inputs by name", "inputs.input_ids", -3),
        ("inputs by name", "inputs.attention_mask", 2),
        ("inputs by name", "targets", 2),
    ],
)
def test_a_bad_record_removes_exactly_itself(
    name: str, array: str, value: float, tmp_path: Path
) -> None:
    form, arrays = CASES[name]
    whole = load_site(write(tmp_path / "a", *form, **arrays)).data()
    part = load_site(write(tmp_path / "b", *form, **changed(arrays, array, value))).data()
    kept = torch.tensor([k for k in range(40) if k != 7])
    assert torch.equal(part.targets, whole.targets[kept])
    pairs = (
        zip(part.inputs.values(), whole.inputs.values(), strict=True)
        if isinstance(part.inputs, dict) and isinstance(whole.inputs, dict)
        else [(part.tensor, whole.tensor)]
    )
    for mine, other in pairs:
        assert torch.equal(mine, other[kept])


def test_a_site_without_usable_records_says_so(tmp_path: Path) -> None:
    bad = {**NUMBERS, "targets": np.full(40, np.nan)}
    site = load_site(write(tmp_path / "site", *REGRESSION, **bad))
    with pytest.raises(InvalidValueError, match="no usable record"):
        check_site(site)


def test_training_that_raises_after_the_reservation_answers_in_the_same_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path / "site", records=60)
    honest = training_round.local_update
    sizes: list[int] = []

    def fails(model: nn.Module, theta: Any, data: TensorData, *rest: Any, **more: Any) -> Any:
        sizes.append(len(data))
        if len(data):
            raise RuntimeError("out of memory, with these records")
        return honest(model, theta, data, *rest, **more)

    monkeypatch.setattr(training_round, "local_update", fails)
    update = instruct(site)
    assert update is not None
    assert sizes == [60, 0]
    layout = ParameterLayout.of(load_site(site).model)
    assert {name: part.shape for name, part in update.items()} == {
        name: tuple(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        assert ledger.statement().spent > 0


@pytest.mark.parametrize(
    ("task", "model", "said"),
    [
        ('[task]\nname = "guess"', REGRESSION[1], "task.name"),
        (REGRESSION[0], REGRESSION[1].replace("classes = 1", "classes = 4"), "model.classes"),
        ('[task]\nname = "language_model"', LANGUAGE[1], "task.target_shape"),
        ('[task]\nname = "classification"', REGRESSION[1], 'task.name = "binary"'),
        (REGRESSION[0], REGRESSION[1].replace("input_shape = [3]\n", ""), "model.input_shape"),
    ],
)
def test_files_that_do_not_fit_are_one_line(
    task: str, model: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        load_site(write(tmp_path / "site", task, model, **NUMBERS))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


METRICS = "\n[metrics]\nnoise_multiplier = 5.0\nrecords = 40\nreleases = 3\n"
LABELS = (
    '[task]\nname = "multilabel"\ntarget_shape = [2]',
    '[model]\nname = "softmax"\ninput_shape = [3]\nclasses = 2',
)
YES_NO = (
    '[task]\nname = "binary"',
    '[model]\nname = "softmax"\ninput_shape = [3]\nclasses = 1',
)
SIGNS = NUMBERS["inputs"][:, :2] > 0
SCORED = {
    **CASES,
    "multilabel": (LABELS, {"inputs": NUMBERS["inputs"], "targets": SIGNS}),
    "binary": (YES_NO, {"inputs": NUMBERS["inputs"], "targets": SIGNS[:, 0]}),
}


class NoNoise:
    """In the place of the site's generator, so that the figure before the noise shows."""

    def normal(self, *arguments: object) -> list[float]:
        return [0.0]


def ask(site: Path, parameters: dict[str, Any], number: int = 1) -> float | None:
    return answer_question(lambda: site, lambda: Question(number, parameters), number)


@pytest.mark.parametrize("name", SCORED)
def test_a_site_sends_a_noised_score_of_every_task(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the noise it is the sum of the scores of a plain pass over the records."""
    form, arrays = SCORED[name]
    held_out = {
        part.replace("inputs", "test_inputs").replace("targets", "test_targets"): values
        for part, values in arrays.items()
    }
    bound = "score_bound = 3.0\n" if name == "regression" else ""
    site = write(tmp_path / "site", *form, **arrays, **held_out)
    site.write_text(site.read_text() + METRICS + bound)
    monkeypatch.setattr(noised_score, "SecureRandom", NoNoise)
    loaded = load_site(site)
    data, model = loaded.held_out(), loaded.model
    parameters = {part: values.detach().numpy() for part, values in model.named_parameters()}
    arguments, named = call_arguments(data.inputs)
    scores = loaded.score(output_of(model(*arguments, **named)), data.targets)
    found = ask(site, parameters)
    assert found is not None
    assert found == round(float(scores.sum()) / SCORE_UNITS) / 40
    assert 0 < found < 1
    assert ask(site, parameters) == found


def test_a_regression_without_a_bound_of_its_score_is_one_line(tmp_path: Path) -> None:
    site = write(tmp_path / "site", *REGRESSION, **NUMBERS)
    site.write_text(site.read_text() + METRICS)
    with pytest.raises(InvalidValueError, match=r"site\.toml: metrics\.score_bound.*must be given"):
        load_site(site)
