"""Fixtures for all tests: caches are in a temporary folder of the test run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from command import Noisewise, command


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


@pytest.fixture
def noisewise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Noisewise:
    """The command in this process."""
    return command(capsys, monkeypatch)
