"""Compare private steps with plain SGD on models that people use.

    python benchmarks/models.py [--cases lstm,vit] [--repetitions 9] [--json FILE]

One thread. The two variants of a case take turns of a few steps each, and a ratio is the median of
the ratios within a turn, so a busy machine slows both in the same way. "SGD" is an ordinary step of
the same model as its library calls it: forward, backward, update. "private" is the clipped sum of
per-record gradients and the update, as the simulator computes it. Peak memory is the growth of a
separate process during its first steps (Linux only). BERT, DistilBERT and GPT-2 are models of
`transformers` with random weights and adapters of `peft` (extra ``hf``).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training import FastGradients, ParameterLayout
from noisewise.training.inputs import Inputs, call_arguments, output_of

CLIP_NORM, LEARNING_RATE = 1.0, 1e-6
LENGTH, VOCABULARY = 64, 2000
Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[], None]


def language_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over positions of the next token's cross-entropy."""
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


# --- models -------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(128, 10)
        self.cells = kind(64, 128, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(tokens))[0][:, -1])


class VitBlock(nn.Module):
    """A block as timm writes it: one product for queries, keys and values, and layer scales."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale1 = nn.Parameter(torch.full((width,), 0.1))
        self.scale2 = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, n, d)) * self.scale1
        return x + self.down(functional.gelu(self.up(self.norm2(x)))) * self.scale2


class Vit(nn.Module):
    """A small vision transformer with the structure of timm's."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*(VitBlock(width, 3) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class ChannelNorm(nn.LayerNorm):
    """timm's LayerNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.down(functional.gelu(self.up(h))).permute(0, 3, 1, 2)
        return x + h * self.gamma.reshape(1, -1, 1, 1)


def convnext() -> nn.Module:
    """A small ConvNeXt with the structure of timm's."""
    return nn.Sequential(
        nn.Conv2d(3, 40, 2, stride=2),
        ChannelNorm(40),
        *(ConvNextBlock(40) for _ in range(2)),
        ChannelNorm(40),
        nn.Conv2d(40, 80, 2, stride=2),
        *(ConvNextBlock(80) for _ in range(2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(80),
        nn.Linear(80, 10),
    )


class GroupNormOfChannels(nn.GroupNorm):
    """timm's GroupNormAct: a subclass whose forward calls the function and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return functional.relu(x)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = GroupNormOfChannels(8, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, width)
        self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.second(self.norm1(self.first(x))))
        return functional.relu(h + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        GroupNormOfChannels(8, 32),
        ResidualBlock(32, 32, 1),
        ResidualBlock(32, 64, 2),
        ResidualBlock(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )


def upward() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 3, padding=1),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def _no_dropout(config: Any) -> Any:
    for name in list(vars(config)):
        if name.endswith(("dropout", "dropout_prob", "pdrop")):
            setattr(config, name, 0.0)
    return config


def hugging_face(kind: str) -> nn.Module:
    import transformers

    common = {"vocab_size": VOCABULARY}
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
            num_labels=10, **common,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(_no_dropout(config))
    if kind == "distilbert":
        config = transformers.DistilBertConfig(
            dim=128, n_layers=4, n_heads=4, hidden_dim=512, num_labels=10, **common
        )
        return transformers.DistilBertForSequenceClassification(_no_dropout(config))
    config = transformers.GPT2Config(
        n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        num_labels=10, use_cache=False, **common,
    )  # fmt: skip
    make = (
        transformers.GPT2LMHeadModel
        if kind == "gpt2"
        else transformers.GPT2ForSequenceClassification
    )
    return make(_no_dropout(config))


def with_lora(kind: str) -> nn.Module:
    import peft

    targets = {"bert": ["query", "value"], "distilbert": ["q_lin", "v_lin"]}.get(kind, ["c_attn"])
    config = peft.LoraConfig(r=8, target_modules=targets, task_type="SEQ_CLS", lora_dropout=0.0)
    model = hugging_face("gpt2-classifier" if kind == "gpt2" else kind)
    return peft.get_peft_model(model, config)


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    form: str  # "tokens", "named tokens", or numbers as in "3x32x32"
    goal: float
    loss: Loss = functional.cross_entropy

    def records(self, batch: int) -> tuple[Inputs, Tensor]:
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(10, (batch,), generator=generator)
        if "tokens" not in self.form:
            shape = [int(size) for size in self.form.split("x")]
            return torch.randn(batch, *shape, generator=generator), targets
        tokens = torch.randint(1, VOCABULARY, (batch, LENGTH), generator=generator)
        if self.loss is language_loss:
            targets = tokens
        if self.form == "tokens":
            return tokens, targets
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, targets

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.model().train()


CASES = {
    "LoRA BERT": Case(lambda: with_lora("bert"), "named tokens", 1.15),
    "LoRA DistilBERT": Case(lambda: with_lora("distilbert"), "named tokens", 1.15),
    "LoRA GPT-2": Case(lambda: with_lora("gpt2"), "named tokens", 1.15),
    "BERT": Case(lambda: hugging_face("bert"), "named tokens", 2.2),
    "GPT-2 LM": Case(lambda: hugging_face("gpt2"), "named tokens", 2.2, language_loss),
    "TransformerEncoder": Case(Encoder, "tokens", 2.0),
    "ViT": Case(Vit, "3x32x32", 2.0),
    "ConvNeXt": Case(convnext, "3x32x32", 3.0),
    "ResNet GroupNorm": Case(resnet, "3x32x32", 3.0),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), "tokens", 3.0),
    "GRU": Case(lambda: Recurrent(nn.GRU), "tokens", 3.0),
    "Conv3d": Case(volumes, "1x16x16x16", 1.5),
    "ConvTranspose2d": Case(upward, "32x8x8", 2.0),
}


def sgd(case: Case, batch: int) -> Step:
    """Ordinary training without privacy."""
    model, (inputs, targets) = case.build(), case.records(batch)
    positional, named = call_arguments(inputs)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=LEARNING_RATE)

    def step() -> None:
        optimiser.zero_grad()
        case.loss(output_of(model(*positional, **named)), targets).backward()
        optimiser.step()

    return step


def private(case: Case, batch: int) -> Step:
    """Clipped sum and update; no sampling and no noise."""
    model, (inputs, targets) = case.build(), case.records(batch)
    theta = ParameterLayout.of(model).flatten(model)
    engine = FastGradients(model, case.loss)
    point, total = theta.double(), torch.zeros(len(theta), dtype=torch.float64)

    def step() -> None:
        total.zero_()
        engine.add_clipped_sum(theta, inputs, targets, CLIP_NORM, total)
        point.add_(total, alpha=-LEARNING_RATE / batch)
        theta.copy_(point)

    step()
    if engine.fallback_reason or engine.by_reference:
        print(f"  not by rules: {engine.fallback_reason or engine.by_reference}", file=sys.stderr)
    return step


def timed(step: Step, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start) / steps


def ratio(case: Case, batch: int, repetitions: int) -> dict[str, float]:
    plain, ours = sgd(case, batch), private(case, batch)
    once = [timed(step, 2) for step in (plain, ours)]
    steps = max(1, round(0.15 / once[0]))
    turns = [(timed(plain, steps), timed(ours, steps)) for _ in range(repetitions)]
    return {
        "sgd_ms": 1e3 * min(turn[0] for turn in turns),
        "private_ms": 1e3 * min(turn[1] for turn in turns),
        "ratio": statistics.median(turn[1] / turn[0] for turn in turns),
    }


def peak_memory(variant: str, name: str, batch: int) -> float:
    """Growth of the peak memory of a new process during three steps, in MB."""
    code = (
        "import resource, sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1]);"
        "import models; case = models.CASES[sys.argv[3]];"
        "case.build(); case.records(int(sys.argv[4]));"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "step = getattr(models, sys.argv[2])(case, int(sys.argv[4]));"
        "[step() for _ in range(3)];"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    arguments = [str(Path(__file__).parent), variant, name, str(batch)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--memory", action="store_true", help="only peak memory, at batch 128")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    if options.memory:
        for variant in ("sgd", "private"):
            megabytes = peak_memory(variant, "TransformerEncoder", 128)
            results[variant] = {"peak_mb": megabytes}
            print(f"TransformerEncoder, batch 128, {variant}: {megabytes:.0f} MB", flush=True)
    else:
        print(f"{platform.machine()}, torch {torch.__version__}, batch {options.batch}")
        print(f"{'model':20} {'SGD ms':>8} {'private ms':>10} {'ratio':>6} {'goal':>5}")
        for name in options.cases.split(","):
            row = results[name] = ratio(CASES[name], options.batch, options.repetitions)
            numbers = f"{row['sgd_ms']:8.1f} {row['private_ms']:10.1f} {row['ratio']:6.2f}"
            print(f"{name:20} {numbers} {CASES[name].goal:5.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
