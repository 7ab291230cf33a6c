"""Sites fine-tune a Hugging Face model with LoRA: only the adapter travels through Flower."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
peft = pytest.importorskip("peft", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import context  # noqa: E402
from flower_link import honest, link  # noqa: E402
from flwr.app import Context, Message, RecordDict  # noqa: E402
from site_cases import SITE  # noqa: E402

import noisewise as nw  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402
from noisewise.flower.new_app import write_app  # noqa: E402
from noisewise.privacy.budget import PrivacyBudget  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.training.models import make_model  # noqa: E402
from noisewise.training.parameters import ParameterLayout  # noqa: E402

LENGTH, WORDS, RECORDS = 6, 30, 40
MODEL = f"""
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification


def lora(input_shape, n_classes):
    config = BertConfig(
        vocab_size={WORDS}, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings={LENGTH}, num_labels=n_classes,
    )
    options = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(BertForSequenceClassification(config), options)
"""
PART = f"""[model]
name = "lora_model:lora"
classes = 2

[model.inputs.input_ids]
shape = [{LENGTH}]
dtype = "int64"
vocabulary = {WORDS}

[model.inputs.attention_mask]
shape = [{LENGTH}]
dtype = "int64"
vocabulary = 2

"""


def make_site(folder: Path, number: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(number)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (RECORDS, 1))).astype(np.int64)
    arrays = {
        "inputs.input_ids": rng.integers(0, WORDS, (RECORDS, LENGTH)),
        "inputs.attention_mask": mask,
        "targets": rng.integers(0, 2, RECORDS),
    }
    np.savez(folder / "records.npz", **arrays)
    text = SITE.format(
        number=number, records=RECORDS, epsilon=8.0, rounds=1, batch=20, epochs=1, normalise="false"
    )
    old = text[text.index("[model]") : text.index("[budget]")]
    (folder / "site.toml").write_text(text.replace(old, PART))
    Ledger.create(folder / "site.ledger", PrivacyBudget(8.0, 1e-3), f"digits-{number}")
    return folder / "site.toml"


def test_only_the_adapter_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lora_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lora_model", raising=False)
    model = make_model("lora_model:lora", (LENGTH,), 2, seed=0)
    layout = ParameterLayout.of(model)
    sites = [make_site(tmp_path / f"site-{number}", number) for number in range(2)]
    replies: list[Message] = []

    def answer(site: Path, message: Message) -> Message:
        replies.append(make_client_app()(message, context(site=str(site))))
        return replies[-1]

    write_app(tmp_path / "app")
    path = next((tmp_path / "app").rglob("server_app.py"))
    server: dict[str, Any] = {"__name__": "server_app"}
    exec(compile(path.read_text(), str(path), "exec"), server)  # noqa: S102
    config = {
        **{"model": "lora_model:lora", "input-shape": str(LENGTH), "classes": 2},
        **{"method": "RobustHDP", "learning-rate": 0.2, "server-steps": 0.0, "num-rounds": 1},
        **{"noise-floor": 0.0, "tolerated-attackers": 0, "noise-floor-for": ""},
        **{"min-clients": 2, "round-seconds": 120.0, "evaluate-every": 0, "public-records": ""},
        **{"task": "classification", "metrics": ""},
        "output": str(tmp_path / "run"),
    }
    with link() as there:
        for site in sites:
            there.add(honest(lambda message, site=site: answer(site, message)))
        server["app"](there.grid, Context(1, 1, {}, RecordDict(), config))
    (record,) = load_run(tmp_path / "run").rounds
    assert len(record.weights) == 2
    updates = [reply.content["delta"] for reply in replies if not reply.has_error()]
    assert [set(update) for update in updates] == [set(layout.names)] * 2
    assert all("lora" in name or "classifier.modules_to_save" in name for name in layout.names)
    assert layout.size < sum(p.numel() for p in model.parameters()) / 10
    before = {name: value.clone() for name, value in model.state_dict().items()}
    filled = nw.load_model(tmp_path / "run", model)
    changed = {n for n, value in filled.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == set(layout.names)
    filled.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
