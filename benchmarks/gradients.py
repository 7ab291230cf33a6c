"""Compare private and non-private steps: our engine, torch's SGD and every mode of Opacus.

    python benchmarks/gradients.py [--cases cnn-64,resnet18-32] [--repetitions 15] [--json FILE]

Everything runs on one thread. The variants of a case take turns of a few steps each. Ratios are
medians of the ratios within a turn, so a busy machine slows all variants in the same way. A time is
the smallest processor time of one step over all turns, from the batch to the updated parameters.
Peak memory is the growth of a separate process during its first steps (Linux only). Opacus is
skipped if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.plan import LocalPlan
from noisewise.randomness import SeededRandom
from noisewise.training import FastGradients, ParameterLayout, TensorData, local_update
from noisewise.training.models import make_model

CLIP_NORM, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.0, 1e-6
OPACUS = ("hooks", "functorch", "ew", "ghost")
Step = Callable[[], None]


class TextModel(nn.Module):
    """Embedding and one transformer block."""

    def __init__(self, vocabulary: int = 2000, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(b, t, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(2, 3) / (d // self.heads) ** 0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


@dataclass(frozen=True)
class Case:
    name: str
    batch: int

    @property
    def shape(self) -> tuple[int, ...]:
        return {
            "cnn": (1, 28, 28),
            "resnet18": (3, 32, 32),
            "resnet18-cifar": (3, 32, 32),
            "mlp": (784,),
            "softmax": (64,),
            "text": (32,),
        }[self.name]

    def model(self) -> nn.Module:
        if self.name == "text":
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return TextModel()
        options: dict[str, object] = {"mlp": {"hidden": 128}}.get(self.name, {})
        if self.name == "resnet18-cifar":
            options = {"stem": "cifar"}
        return make_model(self.name.split("-")[0], self.shape, 10, 0, **options)

    def records(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(0, 10, (self.batch,), generator=generator)
        if self.name == "text":
            return torch.randint(0, 2000, (self.batch, *self.shape), generator=generator), targets
        return torch.randn(self.batch, *self.shape, generator=generator), targets

    def __str__(self) -> str:
        return f"{self.name}-{self.batch}"


CASES = [
    *(Case("cnn", batch) for batch in (16, 32, 64, 128)),
    Case("resnet18", 32),
    Case("softmax", 16),
    Case("mlp", 32),
    Case("text", 32),
]
EXTRA = [Case("resnet18-cifar", 32)]


def sgd(case: Case, channels_last: bool) -> Step:
    """Ordinary training without privacy."""
    model, (x, y) = case.model(), case.records()
    if channels_last:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()

    return step


def engine(case: Case, clip_norm: float | None) -> Step:
    """A step with our engine: sum of (clipped) gradients and update; no sampling, no noise."""
    model, (x, y) = case.model(), case.records()
    theta = ParameterLayout.of(model).flatten(model)
    gradients = FastGradients(model, functional.cross_entropy)
    point, total = theta.double(), torch.zeros(len(theta), dtype=torch.float64)

    def step() -> None:
        total.zero_()
        gradients.add_clipped_sum(theta, x, y, clip_norm, total)
        point.add_(total, alpha=-LEARNING_RATE)
        theta.copy_(point)
        assert gradients.fallback_reason is None

    return step


def private_step(case: Case) -> Step:
    """A round of four whole steps of `local_update`: sampling, clipped sum, noise, update."""
    model, data = case.model(), TensorData(*case.records())
    theta = ParameterLayout.of(model).flatten(model)
    gradients = FastGradients(model, functional.cross_entropy)
    plan = LocalPlan(
        sample_rate=1.0, expected_batch=case.batch, steps_per_round=4, clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER, rounds=1, accountant="rdp",
        budget=PrivacyBudget(1.0, 1e-5),
    )  # fmt: skip

    def round_of_four() -> None:
        local_update(
            model, theta, data, plan, LEARNING_RATE, functional.cross_entropy,
            SeededRandom(0, 0, "bench"), engine=gradients,
        )  # fmt: skip

    return round_of_four


def opacus(case: Case, mode: str) -> Step:
    """A step of Opacus: clipping, noise, update."""
    from opacus.grad_sample import wrap_model
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, (x, y) = case.model(), case.records()
    ghost = mode == "ghost"
    options = {"max_grad_norm": CLIP_NORM, "use_ghost_clipping": True} if ghost else {}
    wrapped = wrap_model(model, grad_sample_mode=mode, **options)
    make = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    optimiser = make(
        torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=case.batch,
    )
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.CrossEntropyLoss()
    if ghost:
        criterion = DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss())

    def step() -> None:
        optimiser.zero_grad()
        criterion(wrapped(x), y).backward()
        optimiser.step()

    return step


STEPS_OF = {"private step": 4}  # variants that take several steps in one call


def variants(case: Case) -> dict[str, Callable[[], Step]]:
    """Functions that prepare a step, by name of the variant."""
    makers: dict[str, Callable[[], Step]] = {"sgd": lambda: sgd(case, False)}
    if len(case.shape) == 3:
        makers["sgd channels-last"] = lambda: sgd(case, True)
    makers["engine, not clipped"] = lambda: engine(case, None)
    makers["engine"] = lambda: engine(case, CLIP_NORM)
    makers["private step"] = lambda: private_step(case)
    if importlib.util.find_spec("opacus") is not None:
        for mode in OPACUS:
            makers[f"opacus {mode}"] = lambda mode=mode: opacus(case, mode)
    return makers


def timed(case: Case, repetitions: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of one step and the ratio to SGD, by variant."""
    steps: dict[str, Step] = {}
    for name, make in variants(case).items():
        try:
            steps[name] = make()
            steps[name]()
        except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
            print(f"  {case}: {name} failed: {error}", file=sys.stderr)
            steps.pop(name, None)
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            step()  # not timed: the caches contain data of the previous variant
            times = []
            for _ in range(calls):
                start = time.process_time()
                step()
                times.append((time.process_time() - start) / STEPS_OF.get(name, 1))
            turns[name].append(statistics.median(times))
    return {
        name: {
            "milliseconds": 1e3 * min(times),
            "over_sgd": statistics.median(a / b for a, b in zip(times, turns["sgd"], strict=True)),
        }
        for name, times in turns.items()
    }


def memory(field: str) -> float:
    """Return the memory of this process in MB: field "VmRSS" is now, "VmHWM" is the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) / 1024
    return 0.0


def grown_by(case: Case, name: str) -> float:
    """Return by how many MB this process grows during the first steps of a variant.

    A step on two records is made first, so that memory for libraries is not counted.
    """
    variants(replace(case, batch=2))[name]()()
    step = variants(case)[name]()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(3):
        step()
    return memory("VmHWM") - before


def peak_memory(case: Case, name: str) -> float | None:
    """Run `grown_by` in a separate process; None if it fails."""
    command = [sys.executable, __file__, "--memory-of", str(case), name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(result.stdout) if result.returncode == 0 else None


def table(results: dict[str, dict[str, dict[str, float | None]]]) -> str:
    lines = [
        f"{'case':<18}{'variant':<22}{'ms/step':>9}{'/ sgd':>8}{'/ sgd ch-last':>15}{'peak MB':>9}"
    ]
    for case, rows in results.items():
        last = rows.get("sgd channels-last", {}).get("over_sgd")
        for name, row in rows.items():
            over, memory = row["over_sgd"] or 0.0, row.get("peak_megabytes")
            lines.append(
                f"{case:<18}{name:<22}{row['milliseconds']:>9.2f}{over:>8.2f}"
                + (f"{over / last:>15.2f}" if last else f"{'':>15}")
                + (f"{memory:>9.0f}" if memory is not None else f"{'':>9}")
            )
        of_opacus = [row["over_sgd"] for name, row in rows.items() if name.startswith("opacus")]
        if of_opacus:
            gains = [min(of_opacus) / rows[name]["over_sgd"] for name in ("engine", "private step")]
            lines.append(
                f"{case:<18}speed-up over the best mode of Opacus: engine {gains[0]:.2f}, "
                f"whole private step {gains[1]:.2f}"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    by_name = {str(case): case for case in CASES + EXTRA}
    parser.add_argument("--cases", default=",".join(map(str, CASES)), help=", ".join(by_name))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--no-memory", action="store_true", help="do not measure the peak memory")
    parser.add_argument("--memory-of", nargs=2, metavar=("CASE", "VARIANT"), help="(internal)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook")
    if arguments.memory_of:
        print(grown_by(by_name[arguments.memory_of[0]], arguments.memory_of[1]))
        return
    results: dict[str, dict[str, dict[str, float | None]]] = {}
    for name in arguments.cases.split(","):
        case = by_name[name]
        # With Opacus, a step of the ResNet takes seconds.
        turns, calls = (
            (min(3, arguments.repetitions), 1) if "resnet" in name else (arguments.repetitions, 3)
        )
        results[name] = {k: dict(v) for k, v in timed(case, turns, calls).items()}
        if not arguments.no_memory:
            for variant, row in results[name].items():
                row["peak_megabytes"] = peak_memory(case, variant)
        print(table({name: results[name]}), flush=True)
    if arguments.json:
        about = {"torch": torch.__version__, "machine": platform.processor(), "threads": 1}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
