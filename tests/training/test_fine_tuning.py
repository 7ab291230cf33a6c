"""Hugging Face models with LoRA, BitFit or a head: exact, fast, and nothing else changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import noisewise as nw
from noisewise.data import dataset_from_arrays
from noisewise.federation.fingerprint import fingerprint
from noisewise.training import IsolatedGradients
from noisewise.training import transformers_masks as masks
from noisewise.training.parameters import ParameterLayout
from noisewise.training.synthetic_records import RecordForm

peft = pytest.importorskip("peft", reason="needs requirements-extras.lock")
transformers = pytest.importorskip("transformers", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

LENGTH, WORDS = 10, 40


def base(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=LENGTH, num_labels=2,
        )  # fmt: skip
        model: nn.Module = transformers.BertForSequenceClassification(config).eval()
    return model


def fine_tuned(train: str, seed: int = 0, alpha: int = 8) -> nn.Module:
    model = base(seed)
    if train == "lora":
        options = peft.LoraConfig(
            task_type="SEQ_CLS", r=2, lora_alpha=alpha, target_modules=["query", "value"]
        )
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = peft.get_peft_model(model, options).eval()
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at first, so that A would get no gradient
                    nn.init.normal_(parameter, std=0.3)
        return model
    for name, parameter in model.named_parameters():
        is_bias = train == "bitfit" and name.endswith("bias")
        parameter.requires_grad = is_bias or name.startswith("classifier")
    return model


def gpt(train: str) -> nn.Module:
    """GPT-2 as a language model; `train` is "lora"."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH
        )
        model = transformers.GPT2LMHeadModel(config)
        options = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        made: nn.Module = peft.get_peft_model(model, options).eval()
        for parameter in made.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
    return made


def tokens(n: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Records with padding, and every third one without."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    ends = torch.randint(2, LENGTH + 1, (n, 1), generator=generator)
    ends[::3] = LENGTH
    mask = (torch.arange(LENGTH) < ends).long()
    targets = torch.randint(2, (n,), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}, targets


def loop(model: nn.Module, loss: Any, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """[b, p] gradients, one ordinary backward pass for each record."""
    model, rows = copy.deepcopy(model), []
    for row in range(len(targets)):
        model.zero_grad()
        logits = model(**{name: part[row : row + 1] for name, part in inputs.items()}).logits
        loss(logits, targets[row : row + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    return torch.stack(rows).double()


def places(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), targets)


CASES = [("lora", None), ("bitfit", None), ("head", None), ("lora", gpt)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("train", "kind"), CASES)
def test_clipped_sums_are_those_of_single_records(train: str, kind: Any) -> None:
    model = (kind or fine_tuned)(train)
    inputs, targets = tokens(9)
    loss: Any = functional.cross_entropy
    if kind is gpt:
        loss, targets = places, inputs["input_ids"]
    rows = loop(model, loss, inputs, targets)
    norms = rows.norm(dim=1)
    clip = float(norms.median())
    expected = (rows * (clip / norms).clamp(max=1)[:, None]).sum(0)
    engine, theta = IsolatedGradients(model, loss), ParameterLayout.of(model).flatten(model)
    total = engine.clipped_sum(theta, inputs, targets, clip)
    assert torch.linalg.vector_norm(total - expected) <= 1e-5 * expected.norm()
    check = engine.prepare(theta, RecordForm.of(inputs, targets))
    assert check.sizes != (1,), check.reason  # records are computed together
    if kind is None:
        rows_of_table = nw.explain_model(model, inputs).rows
        assert {row.path for row in rows_of_table} <= {"rule", "shared value", "frozen"}


def test_masks_are_the_reason_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: without the same mask for every batch, records are computed one by one."""
    from transformers import masking_utils

    model, (inputs, targets) = fine_tuned("head"), tokens(9)
    with masks.same_masks():
        assert masking_utils.is_tracing()
        same = model(**inputs).logits
        whole = model(**{name: part[::3] for name, part in inputs.items()}).logits
    assert not masking_utils.is_tracing()  # outside, the library does as before
    torch.testing.assert_close(same, model(**inputs).logits)
    torch.testing.assert_close(whole, same[::3])
    monkeypatch.setattr(masks, "_FUNCTION", "no_such_function")
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: False)
    engine, theta = IsolatedGradients(model, functional.cross_entropy), torch.zeros(34)
    check = engine.prepare(theta, RecordForm.of(inputs, targets))
    assert check.sizes == (1,)
    assert "branches" in check.reason


def prepared(model: nn.Module) -> nw.Prepared:
    inputs, _ = tokens(60)
    targets = np.arange(60) % 2
    arrays = {name: part.numpy() for name, part in inputs.items()}
    clients = nw.split_dataset(dataset_from_arrays(arrays, targets, n_classes=2), 2, seed=0)
    specs = nw.make_specs(clients, epsilons=[2.0, 8.0], batch_sizes=12, delta=1e-2)
    method = nw.make_method("RobustHDP")
    plans = nw.plan_clients(specs, method, rounds=2, clip_norm=1.0, accountant="rdp")
    settings = nw.TrainingSettings(rounds=2, learning_rate=0.3)
    return nw.Prepared(nw.make_clients(specs, clients), plans, method, model, settings)


@pytest.mark.parametrize("train", ["lora", "bitfit", "head"])
def test_only_the_trainable_set_changes_and_is_saved(train: str, tmp_path: Path) -> None:
    model = fine_tuned(train)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    result = nw.simulate(prepared(model), folder=tmp_path / "run")
    state = result.model.state_dict()
    assert {name for name in state if not torch.equal(state[name], before[name])} == trained
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    size = 4 * ParameterLayout.of(model).size
    assert all(
        file.stat().st_size < 4 * size + 20_000
        for file in (tmp_path / "run" / "checkpoints").iterdir()
    )
    inputs, _ = tokens(4, seed=9)
    expected = result.model(**inputs).logits
    loaded = nw.load_model(tmp_path / "run", fine_tuned(train, seed=5))
    torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=0)
    result.model.save_pretrained(tmp_path / "saved")
    if train == "lora":
        again = peft.PeftModel.from_pretrained(base(), tmp_path / "saved")
        assert not (tmp_path / "saved" / "model.safetensors").exists()  # the adapter alone
    else:
        again = transformers.BertForSequenceClassification.from_pretrained(
            tmp_path / "saved", local_files_only=True
        )
    torch.testing.assert_close(again.eval()(**inputs).logits, expected)


def test_another_base_or_scale_is_another_run() -> None:
    """LoRA starts with the same parameters on every base; a folder must not return old results."""
    first = fingerprint(prepared(fine_tuned("lora")))
    assert first == fingerprint(prepared(fine_tuned("lora")))
    other = fine_tuned("lora", seed=3)
    model = fine_tuned("lora")
    other.load_state_dict(
        {name: p for name, p in model.named_parameters() if p.requires_grad}, strict=False
    )
    assert first != fingerprint(prepared(other))
    assert first != fingerprint(prepared(fine_tuned("lora", alpha=16)))


def test_the_code_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "fine_tuning.md", "exec"), {"__name__": "docs"})  # noqa: S102
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
