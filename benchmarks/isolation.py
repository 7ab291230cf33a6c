"""Time the isolation of records in a deployed step: gradients with and without it, and the noise.

    python benchmarks/isolation.py [--cases cnn-32,mlp-32] [--turns 15] [--json FILE]

Everything runs on one thread. Both engines take turns on the same Poisson samples. Ratios are
medians of the ratios within a turn, so a busy machine slows both in the same way. A time is the
smallest processor time of one step over all turns. `self_check_s` is spent once for each model and
machine.
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
from noisewise.training.synthetic_records import RecordForm

STEPS = 4


class Narrow(Case):
    """A model for 13 features, like the heart-disease records: only padding isolates its layers."""

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
    start = time.process_time()
    isolated = IsolatedGradients(model, cross_entropy)
    check = isolated.prepare(theta, RecordForm.of(inputs, targets))
    check_seconds = time.process_time() - start
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
            start = time.process_time()
            work()
            if turn:  # the first turn is a warm-up
                times[name].append((time.process_time() - start) / STEPS)
    by_turn = list(zip(times["without"], times["isolated"], times["noise"], strict=True))
    return {
        "case": str(case),
        "sizes": len(check.sizes),
        "self_check_s": round(check_seconds, 2),
        "gradients_ms": round(1e3 * min(times["without"]), 3),
        "isolated_ms": round(1e3 * min(times["isolated"]), 3),
        "noise_ms": round(1e3 * min(times["noise"]), 3),
        "gradients_ratio": round(statistics.median(i / w for w, i, _ in by_turn), 3),
        "step_ratio": round(statistics.median((i + n) / (w + n) for w, i, n in by_turn), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="names such as cnn-32, separated by commas")
    parser.add_argument("--turns", type=int, default=15, help="number of turns of each engine")
    parser.add_argument("--json", type=Path, help="write the results to this file")
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
