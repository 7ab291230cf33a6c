"""A trained peft adapter is written by its own `save_pretrained` and read back by peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import noisewise as nw
from noisewise.federation.trained_model import ModelStructure, TrainedModel
from noisewise.training.parameters import ParameterLayout

peft = pytest.importorskip("peft", reason="needs requirements-extras.lock")
transformers = pytest.importorskip("transformers", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras


def tiny_bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=12, num_labels=2,
    )  # fmt: skip
    model: torch.nn.Module = transformers.BertForSequenceClassification(config)
    return model


def adapted() -> torch.nn.Module:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model: torch.nn.Module = peft.get_peft_model(tiny_bert(), config)
    return model


def test_peft_reads_the_trained_adapter(tmp_path: Path) -> None:
    model = adapted()
    layout = ParameterLayout.of(model)
    theta = torch.linspace(-1, 1, layout.size)
    trained = TrainedModel(theta, ModelStructure.of(model))
    trained.write(tmp_path)
    assert (tmp_path / "pretrained" / "adapter_config.json").exists()
    loaded = peft.PeftModel.from_pretrained(tiny_bert(), str(tmp_path / "pretrained")).eval()
    ids = torch.arange(6)[None]
    expected = trained.new_module()(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    untrained = model.eval()(input_ids=ids).logits
    assert not torch.allclose(untrained, expected)  # power: the adapter matters
    filled = nw.load_model(tmp_path, adapted()).eval()
    torch.testing.assert_close(filled(input_ids=ids).logits, expected)


def test_no_progress_bar_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_bert()
    theta = torch.zeros(ParameterLayout.of(model).size)
    TrainedModel(theta, ModelStructure.of(model)).write(tmp_path)
    assert (tmp_path / "pretrained" / "config.json").exists()
    assert capfd.readouterr().err == ""
    assert transformers.utils.logging.is_progress_bar_enabled()
