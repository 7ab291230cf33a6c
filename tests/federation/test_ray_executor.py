"""The Ray executor on a local cluster gives the same bits as serial, also if a worker dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import dying_parts
import pytest
from executor_cases import ROUNDS, hashes, reference_run, run_with_a_kill
from federation_helpers import small_run

from noisewise.errors import InvalidValueError

pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    reference_run(folder)
    return folder


@pytest.fixture(autouse=True)
def no_cluster_is_left() -> Iterator[None]:
    import ray

    assert not ray.is_initialized()
    yield
    assert not ray.is_initialized()


def test_bit_identical_to_serial(reference: Path, tmp_path: Path) -> None:
    small_run(rounds=ROUNDS, folder=tmp_path, loss=dying_parts.loss, executor="ray", workers=2)
    assert hashes(tmp_path) == hashes(reference)


@pytest.mark.slow
def test_kill_9_in_mid_round(
    tmp_path: Path,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_with_a_kill(tmp_path, reference, monkeypatch, workers=2, executor="ray")
    said = [record.message for record in caplog.records if "worker died" in record.message]
    assert len(said) == 1
    assert "round 2" in said[0]


def _broken_loss(outputs: object, targets: object) -> None:
    raise ValueError("no such loss")


def test_an_error_of_the_work_is_not_a_death(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="no such loss"):
        small_run(rounds=1, loss=_broken_loss, executor="ray")
    assert "worker died" not in caplog.text


@pytest.mark.slow
def test_an_existing_cluster_is_used_and_left_running(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        small_run(
            rounds=ROUNDS,
            folder=tmp_path,
            loss=dying_parts.loss,
            executor="ray",
            ray_address=cluster.address,
        )
        assert hashes(tmp_path) == hashes(reference)
        ray.init(address=cluster.address, log_to_driver=False)
        assert ray.cluster_resources()["CPU"] == 2
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_nobody_at_the_address() -> None:
    with pytest.raises(InvalidValueError, match=r"training\.ray_address.*running Ray cluster"):
        small_run(rounds=1, executor="ray", ray_address="127.0.0.1:1")
