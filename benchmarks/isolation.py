"""What isolation costs a deployed step: gradients with and without it, and the noise, apart.

    python benchmarks/isolation.py [--cases cnn-32,mlp-32] [--turns 15] [--json FILE]

One thread. Both engines get the same Poisson samples in turn; ratios are medians of the ratios
within a turn, so that a busy machine slows both alike. Times are processor time of one step, the
least of all turns. "self-check" is paid once for each model and machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gradients import CASES, Case
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noisewise.randomness import SecureRandom
from noisewise.training import IsolatedGradients, ParameterLayout, make_engine
from noisewise.training.local import noise_grid
from noisewise.training.synthetic import RecordForm

STEPS = 4


class Narrow(Case):
    """13 features, as the heart-disease records: layers that only padding isolates."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (13,)

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(13, 7), nn.SiLU(), nn.Linear(7, 2))

    def records(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch, 13, generator=generator)
        return inputs, torch.randint(0, 2, (self.batch,), generator=generator)


def measure(case: Case, turns: int) -> dict[str, object]:
    model = case.model()
    theta = ParameterLayout.of(model).flatten(model)
    wide = type(case)(case.name, 4 * case.batch)
    inputs, targets = wide.records()
    begun = time.process_time()
    isolated = IsolatedGradients(model, cross_entropy)
    check = isolated.prepare(theta, RecordForm.of(inputs, targets))
    checked = time.process_time() - begun
    fast = make_engine(model, cross_entropy, isolate=False)
    total, rng = torch.zeros(len(theta), dtype=torch.float64), SecureRandom()

    def gradients(engine: object, samples: list[Tensor]) -> Callable[[], None]:
        def run() -> None:
            for index in samples:
                engine.add_clipped_sum(  # type: ignore[attr-defined]
                    theta, inputs[index], targets[index], 1.0, total
                )

        return run

    def noise() -> None:
        for _ in range(STEPS):
            normals = torch.from_numpy(rng.normal(0, len(theta)))
            total.add_(normals).div_(noise_grid(1.0)).round_().mul_(noise_grid(1.0))

    times: dict[str, list[float]] = {"without": [], "isolated": [], "noise": []}
    for turn in range(turns + 1):
        samples = [torch.from_numpy(rng.poisson_sample(0, len(inputs), 0.25)) for _ in range(STEPS)]
        works = {
            "without": gradients(fast, samples),
            "isolated": gradients(isolated, samples),
            "noise": noise,
        }
        for name, work in works.items():
            begun = time.process_time()
            work()
            if turn:  # the first turn warms up
                times[name].append((time.process_time() - begun) / STEPS)
    both = list(zip(times["without"], times["isolated"], times["noise"], strict=True))
    return {
        "case": str(case),
        "sizes": len(check.rows),
        "self_check_s": round(checked, 2),
        "gradients_ms": round(1e3 * min(times["without"]), 3),
        "isolated_ms": round(1e3 * min(times["isolated"]), 3),
        "noise_ms": round(1e3 * min(times["noise"]), 3),
        "gradients_ratio": round(statistics.median(i / w for w, i, _ in both), 3),
        "step_ratio": round(statistics.median((i + n) / (w + n) for w, i, n in both), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="names as cnn-32, separated by commas")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [*CASES, Narrow("narrow", 32)]
    if options.cases:
        cases = [case for case in cases if str(case) in options.cases.split(",")]
    rows = []
    for case in cases:
        rows.append(measure(case, options.turns))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
