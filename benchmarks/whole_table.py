"""The two goals of `heads.py` as a whole: the CIFAR-10 table, and the features of 60,000 images.

    python benchmarks/heads.py --whole table    [--setting one-step] [--rounds 200] [--minutes 60]
    python benchmarks/heads.py --whole features [--images 60000] [--minutes 15]

The table is 9 populations x 5 methods x 3 seeds; the methods of one population and seed train in
lock step on synthetic features. The images are random, since the time does not depend on them; the
encoder is EfficientNet-Lite0, whose weights have to be in the cache (`noisewise encoders get
efficientnet-lite0`).

Both write a line of runs/bench/whole_*.jsonl after each part: one population and seed, or 2,000
images. The same command resumes. `--minutes` ends a call before it begins another part.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.encoders import ENCODERS
from noisewise.storage import write_atomic
from noisewise.training.feature_cache import cached_features
from noisewise.training.features import make_features

DISTS = tuple(f"Dist{k}" for k in range(1, 10))
SEEDS = (0, 1, 2)
TABLE_METHODS = ("NoiseWise", "RobustHDP", "WeiAvg", "DPFedAvg", "MinEpsilon")
IMAGES_OF_PART = 2000
PARTS = ("table", "features")


def in_parts(
    path: Path, parts: Iterable[str], work: Callable[[str], dict[str, Any]], minutes: float
) -> list[dict[str, Any]]:
    """Time the parts that the file lacks, until the minutes are over; return all lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done, began = {line["part"] for line in lines}, time.perf_counter()
    for part in parts:
        if part in done:
            continue
        if time.perf_counter() - began > 60 * minutes:
            print(f"stopped after {minutes:g} minutes; the same command resumes")
            break
        start = time.perf_counter()
        facts = work(part)
        lines.append({"part": part, "seconds": time.perf_counter() - start, **facts})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        print(f"{part}: {lines[-1]['seconds']:.1f} s", flush=True)
    return lines


def feature_pass(images: int, workers: int, minutes: float, folder: Path) -> str:
    """Time the encoder on random images in parts; return the result as a sentence."""
    [(name, file)] = ENCODERS["efficientnet-lite0"].files.items()
    features = make_features(
        "noisewise.encoders:efficientnet_lite0", (3, 32, 32), weights=name, sha256=file.sha256
    )

    def work(part: str) -> dict[str, Any]:
        start = int(part.split()[-1])
        count = min(IMAGES_OF_PART, images - start)
        records = np.random.default_rng(start).random((count, 3, 32, 32), dtype=np.float32)
        before = os.times()
        with tempfile.TemporaryDirectory() as cache:
            cached_features(
                features, count, lambda a, b: records[a:b], part, Path(cache), workers=workers
            )
        after = os.times()
        used = sum(after[:4]) - sum(before[:4])
        return {"images": count, "workers": workers, "cpu": used}

    parts = [f"image {start}" for start in range(0, images, IMAGES_OF_PART)]
    path = folder / f"whole_features_{images}_{workers}.jsonl"
    return _summary(in_parts(path, parts, work, minutes), len(parts), 15, path)


def table_pass(
    name: str, work: Callable[[str, int], dict[str, Any]], minutes: float, folder: Path
) -> str:
    """Time all populations and seeds of the table; return the result as a sentence.

    Args:
        name: of the settings; each has its own file.
        work: trains all methods of a population and seed in lock step.
        minutes: after which no further part begins.
        folder: of the file.
    """
    parts = [f"{dist} seed {seed}" for dist in DISTS for seed in SEEDS]

    def run(part: str) -> dict[str, Any]:
        dist, _, seed = part.partition(" seed ")
        return work(dist, int(seed))

    path = folder / f"whole_table_{name}.jsonl"
    return _summary(in_parts(path, parts, run, minutes), len(parts), 60, path)


def _summary(lines: list[dict[str, Any]], wanted: int, goal: int, path: Path) -> str:
    total, cpu = (sum(line[what] for line in lines) / 60 for what in ("seconds", "cpu"))
    state = "complete" if len(lines) == wanted else "NOT complete, no result yet"
    return (
        f"{len(lines)} of {wanted} parts ({state}): {total:.1f} min, {cpu:.1f} core minutes; goal: "
        f"at most {goal} min. Written to {path}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this file to those of `heads.py`."""
    parser.add_argument("--whole", choices=PARTS, help="a goal as a whole, in parts; resumable")
    parser.add_argument("--setting", choices=("mixed", "one-step"), default="one-step",
                        help="batches of --whole table")  # fmt: skip
    parser.add_argument("--images", type=int, default=60_000, help="of --whole features")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of a call of --whole")
