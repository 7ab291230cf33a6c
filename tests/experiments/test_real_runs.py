"""One round of the paper's models with 20 clients on real data."""

from __future__ import annotations

from pathlib import Path

import pytest

from noisewise.experiments import load_config, run

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit", "batch"),
    [("mnist", 2000, 16), ("fashion_mnist", 2000, 16), ("cifar10", 400, 5)],
)
def test_one_round(name: str, limit: int, batch: int) -> None:
    config = load_config(
        CONFIGS / f"{name}.toml",
        {"training.rounds": 1, "data.limit": limit, "population.batch_size": batch},
    )
    result = run(config, seed=0, workers=2)
    assert result.status == "finished"
    assert len(result.clients) == 20
    record = result.rounds[0]
    assert record.noise_converged
    assert record.accuracy is not None
    # One round of DP noise at these tiny client sizes: the weights must follow it closely.
    assert 1 <= record.noise_ratio < 1.05
    per_step = {c["noise_multiplier"] for c in result.clients.values()}
    assert len(per_step) > 10
    expected = sum(record.true_noise.values())
    estimated = sum((record.noise_estimate or {}).values())
    assert estimated == pytest.approx(expected, rel=0.3)
