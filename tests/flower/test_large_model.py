"""Two models through real Flower processes: a ResNet-18 (45 MB a message), and a head (51 kB)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = [pytest.mark.extras, pytest.mark.slow]

from flower_traffic import WIDTH, Traffic, features_part, image_site, run_sites  # noqa: E402

from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower.new_app import write_app  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.site.site_file import load_site  # noqa: E402

SITES, ROUNDS = 2, 2
TOLD = f"learning-rate=0.1 min-clients=2 num-rounds={ROUNDS} round-seconds=900.0"


def run(folder: Path, size: int, records: int, changes: dict[str, str], told: str) -> Traffic:
    """Run a federation and check that every update arrived, once and as arrays."""
    app, output = folder / "app", folder / "output"
    sites = [image_site(app, k, records, changes) for k in range(SITES)]
    assert sum(part.numel() for part in load_site(sites[0]).model.parameters()) == size
    traffic = run_sites(folder / "processes", app, sites, f'output="{output}" {told} {TOLD}')
    result = load_run(output)
    assert result.status == "finished"
    assert [len(record.weights) for record in result.rounds] == [SITES] * ROUNDS
    assert [record.dropped for record in result.rounds] == [{}] * ROUNDS
    for site in sites:
        with Ledger.inspect(site.parent / "site.ledger") as ledger:
            entries = ledger.statement().entries
        assert [entry.state for entry in entries] == ["sealed"] * ROUNDS
        assert all((entry.reply_size or 0) > 4 * size for entry in entries)
    megabytes = traffic.sent / ROUNDS / 1e6
    print(json.dumps({"seconds": traffic.seconds / ROUNDS, "megabytes": megabytes}))
    return traffic


def test_eleven_million_parameters_travel_through_a_real_superlink(tmp_path: Path) -> None:
    """Four records, one step a round: what is tried here is the transport."""
    size = 11_181_642
    write_app(tmp_path / "app")
    changes = {
        "records = 2400": "records = 4", "batch_size = 64": "batch_size = 4",
        '"softmax"': '"resnet18"', "[1, 8, 8]": "[3, 32, 32]",
        "planned_rounds = 100": f"planned_rounds = {ROUNDS}",
    }  # fmt: skip
    told = 'model="resnet18" input-shape="3,32,32"'
    traffic = run(tmp_path, size, 4, changes, told)
    # The arrays once a round, and little else: nothing is sent twice or as text.
    assert 4 * size < traffic.sent / ROUNDS < 1.02 * 4 * size


def test_a_head_on_public_features_sends_a_thousandth(tmp_path: Path) -> None:
    """Each message has a process of its own; the features are computed in the first one only."""
    size, records = 10 * (WIDTH + 1), 80
    write_app(tmp_path / "app")
    part = features_part(tmp_path / "app")
    changes = {
        "records = 2400": "records = 90", "[1, 8, 8]": f"[{WIDTH}]", '"softmax"': '"head"',
        "planned_rounds = 100": f"planned_rounds = {ROUNDS}", "\n[limits]": f"{part}\n[limits]",
    }  # fmt: skip
    traffic = run(tmp_path, size, records, changes, f'model="head" input-shape="{WIDTH}"')
    assert 4 * size < traffic.sent / ROUNDS < 4 * size + 200_000  # heartbeats: more if it is slow
    for k in range(SITES):
        assert traffic.logs[f"node-{k}"].count(f"features of {records} records are stored") == 1
        folder = tmp_path / "app" / f"site-{k}" / "site.ledger-features"
        assert folder.stat().st_mode & 0o777 == 0o700
    secrets = [b"encoder", b"flower_traffic", b"features", b"sha256"]
    assert not [secret for secret in secrets if secret in traffic.stream]
