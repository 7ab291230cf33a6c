"""A server's own figures on public records are those of the task."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import LocalGrid, context  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402

from noisewise.errors import InvalidValueError  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.federation.task_info import TaskInfo  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402
from noisewise.flower.new_app import AppSettings, write_app  # noqa: E402
from noisewise.flower.public_scores import public_evaluation, with_public_scores  # noqa: E402
from noisewise.privacy.budget import PrivacyBudget  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.training.models import make_model  # noqa: E402
from noisewise.training.tasks import CLASSIFICATION, make_task  # noqa: E402

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(60, 3)).astype(np.float32)
TARGETS = (INPUTS @ [1.0, -2.0, 0.5] + 0.3).astype(np.float32)


def parameters(model: torch.nn.Module) -> ArrayRecord:
    return ArrayRecord({name: part.detach() for name, part in model.named_parameters()})


def test_a_regression_has_errors_and_no_accuracy(tmp_path: Path) -> None:
    np.savez(tmp_path / "public.npz", inputs=INPUTS, targets=TARGETS)
    model = make_model("softmax", (3,), 1, seed=0)
    with torch.no_grad():
        for part in model.parameters():
            part.fill_(0.25)
    task = make_task("regression", metrics=["mae", "rmse", "r2"])
    evaluate = public_evaluation(model, tmp_path / "public.npz", task)
    assert evaluate is not None
    found = dict(evaluate(1, parameters(model)))
    errors = INPUTS.sum(1) / 4 + 0.25 - TARGETS
    assert found["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    assert set(found) == {"mae", "rmse", "r2"}


def test_faults_of_public_records_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "public.npz"
    np.savez(path, inputs=INPUTS, targets=TARGETS)
    model = make_model("softmax", (3,), 1, seed=0)
    with pytest.raises(InvalidValueError, match=r"public-records: targets = 'float32\[60\]': must"):
        public_evaluation(model, path, CLASSIFICATION)
    np.savez(path, inputs=INPUTS[:, :2], targets=TARGETS)
    with pytest.raises(InvalidValueError, match=r"must have inputs that the model takes"):
        public_evaluation(model, path, make_task("regression"))
    np.savez(path, inputs=INPUTS, targets=np.arange(60) % 3)
    with pytest.raises(InvalidValueError, match=r"public-records: model = .*must be \(8, classes"):
        public_evaluation(model, path, CLASSIFICATION)


def test_figures_of_other_names_and_nan_are_not_recorded() -> None:
    from noisewise.federation.round_record import RoundRecord

    record = RoundRecord(1, {}, {}, None, None)
    task = TaskInfo.of(make_task("regression"))
    scored = MetricRecord({"mae": 2.0, "rmse": float("nan"), "accuracy": 0.5})
    found = with_public_scores(record, task, scored)
    assert found.accuracy is None
    assert found.metrics == {"mae": {"public records": 2.0}}


def test_an_app_for_a_regression_runs_and_reports_its_error(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, AppSettings(task="regression", model="softmax", input_shape=(3,), classes=1))
    text = (app / "site.toml").read_text().replace("records = 2400", "records = 65")
    text = text.replace("planned_rounds = 100", "planned_rounds = 1")
    nodes: dict[int, Any] = {}
    for number in range(3):
        folder = app / f"site-{number}"
        folder.mkdir()
        np.savez(folder / "records.npz", inputs=INPUTS, targets=TARGETS)
        (folder / "site.toml").write_text(text)
        Ledger.create(folder / "site.ledger", PrivacyBudget(2.0, 1e-6), "my-dataset")
        client = make_client_app(folder / "site.toml")
        nodes[number] = lambda message, client=client: answered(client, message)
    np.savez(tmp_path / "public.npz", inputs=INPUTS, targets=TARGETS)
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"noise-floor": 0.0, "num-rounds": 1, "output": str(tmp_path / "run")}
    config |= {"public-records": str(tmp_path / "public.npz"), "metrics": "mae r2"}
    server: dict[str, Any] = {"__name__": "server_app"}
    path = app / "noisewise_app" / "server_app.py"
    exec(compile(path.read_text(), str(path), "exec"), server)  # noqa: S102
    server["main"](LocalGrid(nodes), Context(1, 1, {}, RecordDict(), config))
    result = load_run(tmp_path / "run")
    assert result.task.name == "regression"
    assert np.isfinite(list(result.metrics.values())).all()
    assert set(result.metrics) == {"mae", "r2"}


def answered(client: Any, message: Message) -> Message:
    reply: Message = client(message, context())
    return reply
