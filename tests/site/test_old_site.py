"""Site files and ledgers that commit f7782e9 wrote still work; `old_site` holds such files.

`new_site.toml` is what `noisewise flower new` wrote. `site.toml` is the same for a smaller model,
with ``[metrics]`` and ``[declaration]`` switched on; its ledger has one update and one noised
accuracy, both of round 1.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from noisewise.privacy.declaration import Declaration
from noisewise.privacy.ledger import Ledger, SealedReply, Statement, verify_ledger
from noisewise.site.instruction import check_instruction, check_question
from noisewise.site.interface import answer_declaration, answer_instruction, answer_question
from noisewise.site.requests import Instruction, Question
from noisewise.site.site_file import Site, load_site
from noisewise.training.parameters import ParameterLayout

OLD = Path(__file__).parent / "old_site"
SENT: dict[str, NDArray[np.float32]] = {
    "1.weight": (np.arange(12, dtype=np.float32) / 16).reshape(3, 4),
    "1.bias": np.arange(12, 15, dtype=np.float32) / 16,
}
RATE = 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the old site's folder, with records."""
    place = tmp_path / "site"
    shutil.copytree(OLD, place)
    inputs = np.random.default_rng(0).standard_normal((2400, 4)).astype(np.float32)
    arrays = {"inputs": inputs, "targets": np.arange(2400) % 3}
    held_out = {f"test_{name}": values[:600] for name, values in arrays.items()}
    np.savez(place / "records.npz", **arrays, **held_out)
    return place


def statement(folder: Path) -> Statement:
    with Ledger.inspect(folder / "site.ledger") as ledger:
        return ledger.statement()


def old_hash(*parts: bytes) -> str:
    """`instruction_hash` as commit f7782e9 computed it."""
    digest = hashlib.sha256(b"noisewise-instruction-1")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


LAYOUT = (
    b"ParameterLayout(names=('1.weight', '1.bias'), shapes=(torch.Size([3, 4]), torch.Size([3])))"
)
THETA = b"".join(array.tobytes() for array in SENT.values())


def old_training_hash(site: Site, number: int) -> str:
    plan = site.plan
    budget = f"PrivacyBudget(epsilon={plan.budget.epsilon!r}, delta={plan.budget.delta!r})"  # type: ignore[union-attr]
    words = (
        f"(LocalPlan(sample_rate={plan.sample_rate!r}, expected_batch={plan.expected_batch!r}, "
        f"steps_per_round={plan.steps_per_round!r}, clip_norm={plan.clip_norm!r}, "
        f"noise_multiplier={plan.noise_multiplier!r}, rounds={plan.rounds!r}, "
        f"accountant={plan.accountant!r}, budget={budget}), False)"
    )
    told = json.dumps({"learning_rate": RATE, "round": number}).encode()
    return old_hash(b"flower-train-1", told, LAYOUT, words.encode(), THETA)


def old_metrics_hash(number: int) -> str:
    told = json.dumps({"round": number}).encode()
    return old_hash(b"flower-evaluate-1", told, LAYOUT, b"(20.0, 600)", THETA)


def test_a_site_file_of_the_old_template_is_read(folder: Path) -> None:
    new = load_site(folder / "new_site.toml")
    assert new.config.metrics is None
    assert answer_declaration(lambda: folder / "new_site.toml") is None
    assert (new.plan.steps_per_round, new.plan.clip_norm, new.rounds_allowed) == (38, 1.0, 100)
    assert new.record_form.inputs[0].shape == (1, 8, 8)
    site = load_site(folder / "site.toml")
    assert site.config.metrics is not None
    assert site.config.metrics.releases == 10
    assert answer_declaration(lambda: folder / "site.toml") == Declaration("record", 2.0, 1e-6)
    assert len(site.data()) == 2400
    assert len(site.held_out()) == 600


def test_an_old_ledger_is_sound_and_names_requests_as_today(folder: Path) -> None:
    assert verify_ledger(folder / "site.ledger").problems == ()
    training, metrics = statement(folder).entries
    assert (training.purpose, training.state) == ("training", "sealed")
    assert (metrics.purpose, metrics.state) == ("metrics", "sealed")
    site = load_site(folder / "site.toml")
    layout, limits, part = ParameterLayout.of(site.model), site.config.limits, site.config.metrics
    assert part is not None
    question = check_question(Question(1, SENT), layout, limits)
    assert metrics.instruction == old_metrics_hash(1) == question.digest(layout, part)
    instruction = check_instruction(Instruction(1, RATE, SENT), layout, limits)
    assert old_training_hash(site, 1) == instruction.digest(layout, site.plan, normalise=False)
    # The same as in the ledger, if this machine calibrates the noise to the same last bit.
    if site.plan.noise_multiplier == training.noise_multiplier:
        assert training.instruction == old_training_hash(site, 1)


def test_a_noised_accuracy_of_an_old_ledger_is_sent_again_at_no_cost(folder: Path) -> None:
    before = statement(folder)
    file = folder / "site.toml"
    assert answer_question(lambda: file, lambda: Question(1, SENT)) == 0.34
    assert statement(folder) == before
    assert answer_question(lambda: file, lambda: Question(2, SENT)) is not None
    assert len(statement(folder).entries) == 3


def test_an_update_under_the_old_hash_is_sent_again_at_no_cost(folder: Path) -> None:
    """Stored by the old client's path: reserve by the old hash, seal the old encoding."""
    site = load_site(folder / "site.toml")
    stored = torch.arange(15, dtype=torch.float32)
    with site.open_ledger() as ledger:
        granted = ledger.reserve(old_training_hash(site, 2), site.plan)
        assert not isinstance(granted, SealedReply)
        ledger.seal(granted, save({"delta": stored}))
    before = statement(folder)
    file = folder / "site.toml"
    update = answer_instruction(lambda: file, lambda: Instruction(2, RATE, SENT))
    assert update is not None
    assert np.concatenate([one.ravel() for one in update.values()]).tolist() == stored.tolist()
    assert statement(folder) == before
    assert answer_instruction(lambda: file, lambda: Instruction(3, RATE, SENT)) is not None
    assert len(statement(folder).entries) == len(before.entries) + 1


def test_updates_are_stored_as_before(folder: Path) -> None:
    """The form of a stored update is unchanged: one float32 tensor named delta."""
    file = folder / "site.toml"
    update = answer_instruction(lambda: file, lambda: Instruction(4, RATE, SENT))
    assert update is not None
    with load_site(file).open_ledger() as ledger:
        granted = ledger.reserve(old_training_hash(load_site(file), 4), load_site(file).plan)
    assert isinstance(granted, SealedReply)
    (name, tensor), *more = load(granted.reply).items()
    assert (name, tensor.dtype, more) == ("delta", torch.float32, [])
