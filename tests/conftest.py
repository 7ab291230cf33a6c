"""Fixtures for all tests: caches live in a folder of the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from command import Noisewise, command


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_test_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NOISEWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture
def noisewise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Noisewise:
    """The command in this process."""
    return command(capsys, monkeypatch)
