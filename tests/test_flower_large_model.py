"""A ResNet-18 (11.2 million parameters, 45 MB a message) through real Flower processes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = [pytest.mark.extras, pytest.mark.slow]

from flower_processes import Deployment  # noqa: E402
from wire import Recorder  # noqa: E402

from noisewise.federation.flower.app import write_app  # noqa: E402
from noisewise.federation.flower.site import load_site  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.privacy.budget import PrivacyBudget  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402

PARAMETERS, SITES, ROUNDS = 11_181_642, 2, 2


def large_site(app: Path, number: int) -> Path:
    """Four records, one step a round: what is tried here is the transport."""
    folder = app / f"site-{number}"
    folder.mkdir()
    rng = np.random.default_rng(number)
    inputs = rng.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    np.savez(folder / "records.npz", inputs=inputs, targets=rng.integers(0, 10, 4))
    text = (app / "site.toml").read_text()
    for old, new in {
        "records = 2400": "records = 4", "batch_size = 64": "batch_size = 4",
        '"softmax"': '"resnet18"', "[1, 8, 8]": "[3, 32, 32]",
        "planned_rounds = 100": f"planned_rounds = {ROUNDS}",
    }.items():  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    (folder / "site.toml").write_text(text)
    Ledger.create(folder / "site.ledger", PrivacyBudget(2.0, 1e-6), "my-dataset")
    return folder / "site.toml"


def test_eleven_million_parameters_travel_through_a_real_superlink(tmp_path: Path) -> None:
    app, output = tmp_path / "app", tmp_path / "output"
    write_app(app)
    sites = [large_site(app, k) for k in range(SITES)]
    assert load_site(sites[0]).plan.steps_per_round == 1
    told = (
        f'output="{output}" model="resnet18" input-shape="3,32,32" learning-rate=0.1 min-clients=2 '
        f"num-rounds={ROUNDS} round-seconds=240.0"
    )
    with Deployment(tmp_path / "processes") as there:
        there.superlink()
        recorder = Recorder(there.port)
        for k, site in enumerate(sites):
            through = recorder.port if k == 0 else None
            there.supernode(f"node-{k}", f'site="{site}"', through=through)
        there.wait_for_nodes(SITES)
        began = time.monotonic()
        there.run("run", app, told)
        assert there.wait("run", 500) == 0, there.log("run") + there.log("node-0")
        seconds = time.monotonic() - began
    recorder.close()
    run = load_run(output)
    assert run.status == "finished"
    assert [len(record.weights) for record in run.rounds] == [SITES] * ROUNDS
    assert [record.dropped for record in run.rounds] == [{}] * ROUNDS
    sent = len(recorder.sent)
    figures = {"seconds a round": seconds / ROUNDS, "megabytes a reply": sent / ROUNDS / 1e6}
    print(json.dumps(figures))
    # The arrays once a round, and little else: nothing is sent twice or as text.
    assert 4 * PARAMETERS < sent / ROUNDS < 1.02 * 4 * PARAMETERS
    for site in sites:
        with Ledger.inspect(site.parent / "site.ledger") as ledger:
            entries = ledger.statement().entries
        assert [entry.state for entry in entries] == ["sealed"] * ROUNDS
        assert all((entry.reply_size or 0) > 4 * PARAMETERS for entry in entries)
