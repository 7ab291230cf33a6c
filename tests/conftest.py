"""Settings and fixtures for all tests: one BLAS thread, caches in a folder of the test run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest

# Before numpy and torch are imported. Two workers with two threads each wait for each other on two
# cores: tests/aggregation/test_agreement.py then takes five times the processor time.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from command import Noisewise, command  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_test_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache; the workers of one test run share theirs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    patch = pytest.MonkeyPatch()
    patch.setenv("NOISEWISE_CACHE", str(folder / "noisewise-cache"))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def same_layer_rules() -> Iterator[None]:
    """A layer rule that a test or a page of the documentation registers ends with it."""
    module = sys.modules.get("noisewise.training.engine.layer_rules")
    before = dict(module.LAYER_RULES) if module else None
    yield
    if module is not None and before is not None:
        module.LAYER_RULES.clear()
        module.LAYER_RULES.update(before)


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """A Flower client or server shows its log; the next test's commands must not."""
    logger = logging.getLogger("noisewise")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def noisewise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Noisewise:
    """The command in this process."""
    return command(capsys, monkeypatch)
