"""Fine-tune MiniLM on e-mails of five collections, each with its own epsilon.

Install the extra `hf`, then run `python finetune_spam.py`. The first run downloads the weights
(90.9 MB) and the e-mails. `python finetune_spam.py --tiny` uses random weights and random records
instead: nothing is downloaded, and the accuracy is that of guessing.

`noisewise run spam_lora.toml --output runs/spam_lora` does the same for LoRA from a config.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel, BertPreTrainedModel, BertTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput

import noisewise as nw
from noisewise.data import Dataset, dataset_from_arrays, dataset_from_rows, load_texts
from noisewise.encoders import get_encoder
from noisewise.training.tasks import make_task

LENGTH = 32  # tokens of an e-mail; declared, not that of the longest
PER_COLLECTION = 100  # e-mails that are used of each collection, to keep the example short
EPSILONS = [2.0, 4.0, 8.0, 4.0, 8.0]  # of the collections, in the order of their names
ROUNDS = 4
CLIP_NORM = 2.0
SCALE = 6.0  # of a text's vector, so that it counts more than the bias of the head
LEARNING_RATES = {"lora": 0.5, "bitfit": 0.3, "head": 1.0}

warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


class Classifier(BertPreTrainedModel):
    """BERT, the mean over the tokens of a text scaled to one length, and a linear head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, **_: Any
    ) -> SequenceClassifierOutput:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        used = attention_mask[..., None].to(states.dtype)
        mean = (states * used).sum(1) / used.sum(1).clamp(min=1)
        vector = SCALE * functional.normalize(mean)
        return SequenceClassifierOutput(logits=self.classifier(vector))


def minilm(n_classes: int) -> nn.Module:
    """all-MiniLM-L6-v2 with a head that starts at zero. No pickle and no remote code is read."""
    weights, _ = get_encoder("minilm")
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1536, num_labels=n_classes
    )
    model = Classifier(config)
    missing = model.bert.load_state_dict(load_file(weights), strict=False).missing_keys
    assert not missing, missing
    nn.init.zeros_(model.classifier.weight)
    return model.eval()  # without dropout, as `from_pretrained` returns a model


def tiny(n_classes: int) -> nn.Module:
    """A BERT of 2 layers with random weights."""
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=n_classes,
    )
    return Classifier(config).eval()


def model(
    input_shape: dict[str, tuple[int, ...]],
    n_classes: int,
    train: str = "lora",
    base: str = "minilm",
) -> nn.Module:
    """The model that the clients train; configs name this function.

    Args:
        input_shape: of the records, by the name of the input.
        n_classes: number of logits.
        train: "lora" (two last layers, and the head), "bitfit" (all biases, and the head) or
            "head".
        base: "minilm" or "tiny".
    """
    made = {"minilm": minilm, "tiny": tiny}[base](n_classes)
    if train == "lora":
        last = made.config.num_hidden_layers
        options = LoraConfig(
            r=2,
            lora_alpha=4,
            target_modules=["query", "value"],
            layers_to_transform=[last - 2, last - 1],
            modules_to_save=["classifier"],
        )
        return get_peft_model(made, options)
    for name, parameter in made.named_parameters():
        is_head = name.startswith("classifier.")
        parameter.requires_grad = is_head or (train == "bitfit" and name.endswith(".bias"))
    return made


def mails(per_collection: int = PER_COLLECTION) -> Dataset:
    """Token ids of the e-mails, with the collection of each as its client; configs name this."""
    texts = load_texts("spam")
    chosen = [
        k
        for number in range(len(texts.group_names))
        for k in np.flatnonzero(texts.groups == number)[:per_collection]
    ]
    rows = [
        {
            "text": texts.texts[k] or "empty",
            "label": int(texts.targets[k]),
            "collection": texts.group_names[texts.groups[k]],
        }
        for k in chosen
    ]
    _, vocabulary = get_encoder("minilm")
    tokenizer = BertTokenizerFast(vocab=str(vocabulary))
    return dataset_from_rows(
        rows, tokenizer=tokenizer, length=LENGTH, client="collection", n_classes=2, name="spam"
    )


def made_up() -> Dataset:
    """Random token ids of five clients; clients 0 to 2 have class 0, the others class 1."""
    rng = np.random.default_rng(0)
    collection = np.repeat(np.arange(5), 20)
    targets = (collection >= 3).astype(np.int64)
    ids = rng.integers(2, 50, (100, LENGTH))
    ids[:, 1] = 2 + targets
    mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (100, 1))).astype(np.int64)
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    groups = [f"client-{number}" for number in collection]
    return dataset_from_arrays(inputs, targets, groups=groups, n_classes=2, name="made up")


def fine_tune(data: Dataset, train: str, base: str, rounds: int, folder: Path | None) -> None:
    """Train, print a row of the table, and save what was trained."""
    clients = nw.split_dataset(data, partition="natural", test_fraction=0.2, seed=0)
    specs = nw.make_specs(
        clients, epsilons=EPSILONS, batch_sizes=[len(c.train) for c in clients], delta=1e-4
    )
    method = nw.make_method("NoiseWise")
    shapes = {name: array.shape[1:] for name, array in data.train.inputs.items()}
    network = nw.make_model(model, shapes, 2, seed=0, train=train, base=base)
    start = time.perf_counter()
    result = nw.simulate(
        nw.Prepared(
            nw.make_clients(specs, clients),
            nw.plan_clients(specs, method, rounds=rounds, clip_norm=CLIP_NORM),
            method,
            network,
            nw.TrainingSettings(
                rounds=rounds,
                learning_rate=LEARNING_RATES[train],
                evaluate_every=rounds,
                loss_records=8,
            ),
            task=make_task("classification", metrics=["balanced_accuracy", "accuracy"], classes=2),
        )
    )
    seconds = time.perf_counter() - start
    n_trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    spent = ", ".join(f"{value:.2f}" for value in result.rounds[-1].epsilon_spent.values())
    balanced, plain = (100 * result.metrics[m] for m in ("balanced_accuracy", "accuracy"))
    print(f"{train:>8} {n_trained:>10,} {balanced:>10.1f} {plain:>10.1f} {seconds:>8.0f}  {spent}")
    if folder is not None:
        result.model.save_pretrained(folder / train)


def main() -> None:
    options = argparse.ArgumentParser(description="Fine-tune MiniLM on e-mails.")
    options.add_argument("--tiny", action="store_true", help="random weights, synthetic records")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--train", nargs="+", default=["lora", "bitfit", "head"])
    options.add_argument("--folder", type=Path, help="where to save the trained parameters")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    data = made_up() if chosen.tiny else mails()
    print(f"{len(data.train)} records of {', '.join(data.group_names)}, epsilons {EPSILONS}")
    print("Accuracy in % of the held-out records of all clients; always ham: 50.0 and 60.0")
    print("   train parameters   balanced       mean  seconds  epsilon spent by each client")
    for train in chosen.train:
        fine_tune(data, train, "tiny" if chosen.tiny else "minilm", chosen.rounds, chosen.folder)


if __name__ == "__main__":
    main()
