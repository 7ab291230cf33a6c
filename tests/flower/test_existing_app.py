"""`examples/existing_app` on loopback: the plain app, then the same app with noisewise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = [pytest.mark.extras]

from flower_processes import ROOT, Deployment  # noqa: E402
from flwr.app import ConfigRecord  # noqa: E402

from noisewise.errors import InvalidValueError  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower import show_log  # noqa: E402
from noisewise.flower.run_configs import check_configs  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402

EXAMPLE = ROOT / "examples" / "existing_app"


@pytest.mark.slow
def test_the_app_runs_before_and_after(tmp_path: Path) -> None:
    before, after = EXAMPLE / "before", EXAMPLE / "after"
    output = tmp_path / "output"
    # A site installs its model's code; the path stands for that here.
    code = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(after)])}
    for number in range(3):
        folder = tmp_path / f"site-{number}"
        made = subprocess.run(
            [sys.executable, str(after / "make_site.py"), str(folder), str(number), "3"],
            env={**os.environ, **code}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    with Deployment(tmp_path / "processes") as there:
        there.superlink()
        for number in range(3):
            site = tmp_path / f"site-{number}" / "site.toml"
            config = f'site="{site}" partition-id={number} num-partitions=3'
            there.supernode(f"node-{number}", config, environment=code)
        there.wait_for_nodes(3)
        there.run("before", before, "num-server-rounds=1")
        assert there.wait("before", 1200) == 0, there.log("before")
        there.run("after", after, f'num-server-rounds=1 output="{output}"')
        assert there.wait("after", 1200) == 0, there.log("after")
        plain, told = there.log("before"), there.log("after")
        node = there.log("node-0")
    assert "train_loss" in plain  # the plain app's clients send their losses
    assert "final parameters: conv.weight" in plain
    assert "train_loss" not in told
    assert "final parameters: conv.weight" in told
    assert "round 1: 3 updates used, 0 not" in told  # the log is on by default, at the server
    assert "noisewise.site" in node  # and at a site
    run = load_run(output)
    assert run.status == "finished"
    assert len(run.rounds[0].used) == 3
    for number in range(3):
        with Ledger.inspect(tmp_path / f"site-{number}" / "site.ledger") as ledger:
            statement = ledger.statement()
        assert len(statement.entries) == 1
        assert 0 < statement.spent <= statement.epsilon


@pytest.mark.parametrize("key", ["lr", "learning-rate"])
def test_a_repeated_rate_is_accepted(key: str) -> None:
    check_configs(ConfigRecord({key: 0.5}), None, 0.5)
    with pytest.raises(InvalidValueError, match="remove train_config, or pass the same number"):
        check_configs(ConfigRecord({key: 0.1}), None, 0.5)


def test_other_settings_are_one_line_with_the_remedy() -> None:
    for configs in ((ConfigRecord({"epochs": 3}), None), (None, ConfigRecord({"epochs": 3}))):
        with pytest.raises(InvalidValueError, match=r"\['epochs'\] = 3: .*remove") as caught:
            check_configs(*configs, 0.5)
        assert "\n" not in str(caught.value)


def test_the_log_is_shown_unless_the_user_has_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("noisewise")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    show_log()
    assert logger.handlers == []
    logger.setLevel(logging.NOTSET)
    show_log()
    show_log()
    assert len(logger.handlers) == 1
    logger.info("shown")
    assert capsys.readouterr().err == "INFO noisewise: shown\n"
    logger.setLevel(logging.NOTSET)
