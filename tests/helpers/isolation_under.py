"""Run the self-check and the attack in a separate process, for `test_promise_2_instruction_sets`.

Prints one line of JSON with the instruction sets in use, the batch sizes that the self-check
accepts and the largest change by one record that the attack finds.
"""

from __future__ import annotations

import hashlib
import json

import torch
from hostile_models import made
from torch.nn.functional import conv2d, cross_entropy

from noisewise.federation.hostile_audit import hostile_search
from noisewise.training import IsolatedGradients, ParameterLayout, make_engine


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 333, generator=generator) for n in (64, 77))
    found: dict[str, object] = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "product": digest(left @ right.t()),
        "convolution": digest(conv2d(left.view(1, 64, 333, 1), torch.ones(8, 64, 3, 1))),
    }
    for name in ("mlp", "cnn", "sigmoid"):
        model, form = made(name)
        engine = IsolatedGradients(model, cross_entropy)
        check = engine.prepare(ParameterLayout.of(model).flatten(model), form)
        search = hostile_search(model, cross_entropy, form, engine=engine, seconds=2)
        found[name] = {"rows": len(check.sizes), "first": check.sizes[0], "ratio": search.ratio}
    model, form = made("mlp")
    fast = make_engine(model, cross_entropy, isolate=False)
    found["simulator"] = hostile_search(model, cross_entropy, form, engine=fast, seconds=3).ratio
    print(json.dumps(found))


if __name__ == "__main__":
    main()
