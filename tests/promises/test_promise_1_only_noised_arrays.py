"""Guarantee 1 of docs/privacy.md: only noised arrays leave a client.

Nothing else in a reply depends on the data.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dpsgd import (
    RecordingRandom,
    Update,
    ZeroEngine,
    flawed_update,
    make_test_plan,
    product_loss,
    seeded,
)
from safetensors.torch import save
from torch import Tensor, nn

from noisewise.training import LocalUpdate, TensorData, local_update

P, N = 12, 41


def records(n: int) -> TensorData:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(N, P, generator=generator), torch.ones(N, 1)
    return TensorData(inputs[:n], targets[:n])


@dataclass(frozen=True)
class Run:
    reply: LocalUpdate
    rng: RecordingRandom


def run(update: Update, n: int, engine: object = None, seed: int = 6) -> Run:
    """One round on the first n of N records, under the plan for N records."""
    rng = RecordingRandom(seeded(seed))
    plan = make_test_plan(n=N, batch=4, steps=11, clip=0.7, z=1.3)
    model = nn.Linear(P, 1, bias=False)
    reply = update(model, torch.zeros(P), records(n), plan, 0.1, product_loss, rng, engine=engine)
    return Run(reply, rng)


def check_reply_is_one_bare_array(reply: object) -> None:
    assert dataclasses.is_dataclass(reply)
    assert [f.name for f in dataclasses.fields(reply)] == ["delta"]
    assert set(vars(reply)) == {"delta"}
    delta = reply.delta
    assert type(delta) is Tensor
    assert delta.shape == (P,)
    assert delta.dtype == torch.float32
    assert not vars(delta), "attributes on the tensor"
    assert delta.grad_fn is None
    assert not delta.requires_grad
    assert delta.untyped_storage().nbytes() == P * 4, "a view of something larger"


def header(reply: LocalUpdate) -> bytes:
    """Every byte of the serialised reply outside the arrays."""
    content = save({f.name: getattr(reply, f.name) for f in dataclasses.fields(reply)})
    (length,) = struct.unpack("<Q", content[:8])
    return content[: 8 + length]


def check_nothing_but_the_array_depends_on_data(update: Update) -> None:
    full, less = run(update, N), run(update, N - 1)
    assert header(full.reply) == header(less.reply)
    # Step count, rate and noise, as asked of the source of randomness.
    assert full.rng.rates == less.rng.rates
    assert len(full.rng.noises) == len(less.rng.noises)
    for one, two in zip(full.rng.noises, less.rng.noises, strict=True):
        assert np.array_equal(one, two)
    # The last record apart, the same records are sampled.
    for one, two in zip(full.rng.samples, less.rng.samples, strict=True):
        assert [i for i in one if i < N - 1] == list(two)
    # Without gradients only steps, divisor, z and noise are left: the same to the last bit.
    for seed in range(3):
        quiet, quieter = (run(update, n, ZeroEngine(), seed).reply.delta for n in (N, N - 1))
        assert torch.equal(quiet, quieter)
        assert torch.equal(quiet, run(update, N // 2, ZeroEngine(), seed).reply.delta)


def test_reply_is_one_bare_array() -> None:
    check_reply_is_one_bare_array(run(local_update, N).reply)


def test_parameters_that_require_gradients_leave_no_graph() -> None:
    """An autograd graph on the update would hold the records' gradients."""

    def curved(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()  # its gradient depends on theta

    theta = torch.zeros(P, requires_grad=True)
    plan = make_test_plan(n=N, batch=4)
    model = nn.Linear(P, 1, bias=False)
    reply = local_update(model, theta, records(N), plan, 0.1, curved, seeded())
    check_reply_is_one_bare_array(reply)


def test_nothing_but_the_array_depends_on_data() -> None:
    check_nothing_but_the_array_depends_on_data(local_update)
    check_nothing_but_the_array_depends_on_data(flawed_update(None))


def test_the_last_record_does_count() -> None:
    """The comparison above is not of two runs that ignore their data."""
    full, less = run(local_update, N), run(local_update, N - 1)
    assert any(N - 1 in sample for sample in full.rng.samples)
    assert not torch.equal(full.reply.delta, less.reply.delta)


def test_steps_are_the_plans() -> None:
    assert len(run(local_update, N).rng.noises) == 11
    assert len(run(local_update, 0).rng.noises) == 11
    assert set(run(local_update, 7).rng.rates) == {4 / N}


@pytest.mark.parametrize(
    "flaw",
    [
        "steps from data",
        "divisor from data",
        "realised divisor",
        "rate from data",
        "noise from data",
        "skips empty batches",
        "batch decides noise",
    ],
)
def test_planted_dependence_on_data_is_seen(flaw: str) -> None:
    with pytest.raises(AssertionError):
        check_nothing_but_the_array_depends_on_data(flawed_update(flaw))


@dataclass(frozen=True)
class TellsTooMuch(LocalUpdate):
    n_examples: int = 0


def test_planted_extras_are_seen() -> None:
    sound = run(local_update, N).reply.delta
    noted = sound.clone()
    noted.loss = 0.3  # type: ignore[attr-defined]
    object.__setattr__(smuggled := LocalUpdate(sound), "loss", 0.3)
    leaks = [
        TellsTooMuch(sound, N),
        LocalUpdate(noted),
        smuggled,
        LocalUpdate(sound.double()),
        LocalUpdate(torch.cat([sound, sound])[:P]),
        LocalUpdate(sound.clone().requires_grad_() * 1),
    ]
    for leak in leaks:
        with pytest.raises(AssertionError):
            check_reply_is_one_bare_array(leak)
