"""A weak privacy budget causes a warning with its consequence wherever a person sets one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from command import Noisewise

from noisewise.privacy.budget import PrivacyBudget, budget_warnings
from noisewise.privacy.ledger import Ledger


@pytest.mark.parametrize(
    ("epsilon", "delta", "records", "words"),
    [
        (1.0, 1e-6, None, []),
        (10.0, 1e-4, None, []),
        (10.0, 1e-4, 2400, []),
        (2.0, 0.9 / 2400, 2400, []),
        (10.5, 1e-6, None, ["epsilon = 10.5: weak protection"]),
        (20.0, 1e-6, 2400, ["epsilon = 20: weak protection"]),
        (20.5, 1e-6, 2400, ["epsilon = 20.5: practically no protection"]),
        (5000.0, 0.5, None, ["epsilon = 5000: practically no", "delta = 0.5 is large"]),
        (1e308, 0.5, 1, ["by up to e^1e+308: a guess of 1 in 1,000,000 can become"]),
        (2.0, 2e-4, None, ["delta = 0.0002 is large"]),
        (2.0, 1 / 2400, 2400, ["1 of 2400 on average"]),
        (2.0, 0.01, 2400, ["delta = 0.01 is not below 1/records = 1/2400"]),
        (2.0, 1e-6, 10**9, ["1e+03 of 1000000000 on average"]),
    ],
)
def test_thresholds(epsilon: float, delta: float, records: int | None, words: list[str]) -> None:
    found = budget_warnings(PrivacyBudget(epsilon, delta), records)
    assert len(found) == len(words)
    for warning, expected in zip(found, words, strict=True):
        assert expected in warning
        assert "Choose" in warning
        assert "\n" not in warning


def test_the_odds_are_bayes_rule() -> None:
    """e^epsilon on the odds of 1 in 100, by the definition of odds."""
    (warning,) = budget_warnings(PrivacyBudget(11.0, 1e-9))
    odds = 0.01 / 0.99 * math.exp(11.0)
    assert f"up to {math.exp(11.0):.3g}: a guess of 1 in 100" in warning
    assert f"a probability of {100 * odds / (1 + odds):.4g} %" in warning


def test_publishing_records_at_random_keeps_such_a_promise() -> None:
    """The warning's claim about delta, by simulation: 24 of 2400 records leave in full."""
    published = np.random.default_rng(0).binomial(2400, 0.01, size=10_000)
    assert abs(published.mean() - 24) < 0.3
    assert (published > 0).mean() > 0.999


def test_ledger_init_and_plan_warn_on_stderr(noisewise: Noisewise, tmp_path: Path) -> None:
    init = ("ledger", "init", tmp_path / "a.ledger", "--dataset", "d")
    code, out, err = noisewise(*init, "--epsilon", 5000, "--delta", 0.5)
    assert code == 0
    assert "WARNING" not in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["WARNING", "WARNING"]
    with Ledger.inspect(tmp_path / "a.ledger") as ledger:
        assert ledger.statement().epsilon == 5000
    init = ("ledger", "init", tmp_path / "b.ledger", "--dataset", "d", "--epsilon", 2)
    code, _, err = noisewise(*init, "--delta", 1e-4, "--records", 20_000)
    assert code == 0
    assert "1/records = 1/20000" in err
    plan = ("plan", "--batch-size", 10, "--rounds", 1, "--examples", 100)
    code, out, err = noisewise(*plan, "--epsilon", 12, "--delta", 0.02, "--json")
    assert code == 0
    assert json.loads(out)["delta"] == 0.02
    assert "epsilon = 12: weak" in err
    assert "2 of 100 on average" in err
    assert noisewise(*plan, "--epsilon", 2, "--delta", 1e-4).stderr == ""
