"""Show what the rounding of a record's row depends on, and how hostile parameters can amplify it.

    python benchmarks/rounding.py [--threads 1] [--seconds 6] [--part rows|sizes|search]

- ``rows``: for single operations, how many of 64 rows change if the batch has another size, if
  every row moves by one position, or if the data start 4 bytes later in memory.
- ``sizes``: which batch sizes the self-check accepts for small models of every kind.
- ``search``: the largest change by one record that `hostile_search` finds, with the simulator's
  engine and with the engine of a deployed client.

Set ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA or MKL_CBWR to test other instruction sets.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from noisewise.federation.hostile_audit import hostile_search
from noisewise.training import IsolatedGradients, ParameterLayout, make_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from hostile_models import MODELS, made

COUNT = 64
SMALLER = (1, 2, 3, 4, 5, 8, 12, 16, 20, 32, 48)


def both_ways(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes a layer's output and input gradient, side by side."""

    def run(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        out = layer(leaf)
        weights = torch.linspace(-1, 1, out[0].numel()).view(out[0].shape).expand_as(out)
        (gradient,) = torch.autograd.grad(out, leaf, weights.contiguous())
        return torch.cat([out.detach().flatten(1), gradient.flatten(1)], 1)

    return run


def operations() -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]:
    """Functions and the shapes of their records, by name."""
    cases: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {}
    for inputs, outputs in ((784, 64), (64, 10), (100, 30), (13, 4), (512, 512)):
        cases[f"linear {inputs} to {outputs}"] = nn.Linear(inputs, outputs), (inputs,)
    for last in (False, True):
        for inside, outside, size in ((1, 16, 28), (16, 32, 14), (64, 64, 8)):
            form = torch.channels_last if last else torch.contiguous_format
            layer = nn.Conv2d(inside, outside, 3, padding=1).to(memory_format=form)

            def convolve(x: Tensor, layer: nn.Module = layer, form: object = form) -> Tensor:
                return layer(x.contiguous(memory_format=form))

            name = f"convolution {inside} to {outside}{', channels last' if last else ''}"
            cases[name] = convolve, (inside, size, size)
    for function in (
        torch.sigmoid, functional.silu, functional.softplus, functional.elu, functional.mish,
        functional.gelu, torch.tanh, torch.exp, torch.erf,
    ):  # fmt: skip
        cases[f"{function.__name__} of 7 values"] = function, (7,)
    cases["gelu (tanh) of 7 values"] = lambda x: functional.gelu(x, approximate="tanh"), (7,)
    cases["softmax of 7 values"] = lambda x: torch.softmax(x, 1), (7,)
    cases["GroupNorm"] = nn.GroupNorm(4, 8), (8, 5, 5)
    cases["LayerNorm"] = nn.LayerNorm(33), (33,)
    cases["mean over positions"] = lambda x: x.mean((2, 3)), (8, 5, 5)
    return cases


def print_rows() -> None:
    print("number of rows that change with their position, alignment and the size of the batch")
    print(f"{'operation':<38} {'position':>8} {'alignment':>9}  batch size: rows")
    generator = torch.Generator().manual_seed(0)
    for name, (layer, shape) in operations().items():
        run = both_ways(layer)
        x = torch.randn(COUNT, *shape, generator=generator)
        rows = run(x.clone())
        moved = run(x.roll(1, 0))
        memory = torch.empty(x.numel() + 16)
        shifted = memory[1 : 1 + x.numel()].view(x.shape)
        shifted.copy_(x)
        sizes = {n: changed(run(x[:n].clone()), rows[:n]) for n in SMALLER}
        by_size = ", ".join(f"{n}: {k}" for n, k in sizes.items() if k) or "none"
        position, alignment = changed(moved.roll(-1, 0), rows), changed(run(shifted), rows)
        print(f"{name:<38} {position:>8} {alignment:>9}  {by_size}")


def changed(one: Tensor, other: Tensor) -> int:
    """Return the number of rows that differ."""
    return int((one != other).any(1).sum())


def print_sizes() -> None:
    for name in MODELS:
        model, form = made(name)
        theta = ParameterLayout.of(model).flatten(model)
        check = IsolatedGradients(model, cross_entropy).prepare(theta, form)
        print(f"{name:<12} {len(check.sizes):>3} sizes: {check.sizes[0]} to {check.sizes[-1]}")


def print_search(seconds: float) -> None:
    print(f"{'model':<12} {'simulator':>12} {'deployed':>12}")
    for name in MODELS:
        model, form = made(name)
        ratios = []
        for isolate in (False, True):
            engine = make_engine(model, cross_entropy, isolate=isolate)
            search = hostile_search(model, cross_entropy, form, engine=engine, seconds=seconds)
            ratios.append(search.ratio)
        print(f"{name:<12} {ratios[0]:>12.7f} {ratios[1]:>12.7f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of each search")
    parser.add_argument(
        "--part", choices=("rows", "sizes", "search"), action="append", help="default: all parts"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    parts = options.part or ["rows", "sizes", "search"]
    print(f"{torch.backends.cpu.get_cpu_capability()}, {options.threads} threads\n")
    if "rows" in parts:
        print_rows()
    if "sizes" in parts:
        print_sizes()
    if "search" in parts:
        print_search(options.seconds)


if __name__ == "__main__":
    main()
