"""Every task of the table: losses by the record, metrics that combine, and one-line errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics as reference
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from noisewise.errors import InvalidValueError
from noisewise.federation.evaluation import Scores, combined_scores
from noisewise.training.metrics import IGNORED, Metric, contributions_of, joined, metrics_of_task
from noisewise.training.tasks import (
    TASKS,
    Task,
    check_loss,
    check_outputs,
    check_targets,
    make_task,
)

N = 23


def case(name: str, n: int = N) -> tuple[Tensor, Tensor]:
    """Random outputs and targets of a task."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def whole(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator)

    if name == "classification":
        return normal(n, 4), whole(4, n)
    if name == "binary":
        return normal(n, 1), whole(2, n)
    if name == "multilabel":
        return normal(n, 3), whole(2, n, 3).float()
    if name == "regression":
        return normal(n, 2), normal(n, 2)
    targets = whole(5, n, 3, 4) if name == "segmentation" else whole(5, n, 6)
    targets[::3, 0] = IGNORED
    outputs = normal(n, 5, 3, 4) if name == "segmentation" else normal(n, 6, 5)
    return outputs, targets


@pytest.mark.parametrize("name", TASKS)
class TestEveryTask:
    def test_the_loss_is_the_mean_of_the_records_losses(self, name: str) -> None:
        task, (outputs, targets) = TASKS[name], case(name)
        whole = task.loss(outputs, targets)
        assert whole.shape == ()
        single = [task.loss(outputs[k : k + 1], targets[k : k + 1]) for k in range(N)]
        torch.testing.assert_close(whole, torch.stack(single).mean())

    def test_the_loss_has_gradients_by_record(self, name: str) -> None:
        task, (outputs, targets) = TASKS[name], case(name)

        def one(output: Tensor, target: Tensor) -> Tensor:
            return task.loss(output[None], target[None])

        together = vmap(grad(one))(outputs, targets)
        assert together.shape == outputs.shape
        torch.testing.assert_close(together[2], grad(one)(outputs[2], targets[2]))
        assert bool(together.flatten(1).any(dim=1).all())

    def test_metrics_of_batches_are_those_of_all_records(self, name: str) -> None:
        outputs, targets = case(name)
        for metric in metrics_of_task(name).values():
            whole = metric.finish(contributions_of(metric, outputs, targets), N)
            parts = [
                contributions_of(metric, outputs[a:b], targets[a:b])
                for a, b in ((0, 1), (1, 9), (9, N))
            ]
            assert metric.finish(joined(metric, parts), N) == pytest.approx(whole), metric.name
            assert math.isfinite(whole)

    def test_its_own_outputs_and_targets_fit(self, name: str) -> None:
        outputs, targets = case(name)
        task = make_task(name)
        assert check_outputs(task, outputs, targets) is outputs
        array = targets.numpy()
        assert check_targets(task, array).dtype == array.dtype

    def test_another_shape_of_outputs_is_refused(self, name: str) -> None:
        outputs, targets = case(name)
        for bad in (outputs[:-1], torch.stack([outputs] * 2, -1), outputs.reshape(-1)):
            if bad.shape != (N,) or name != "binary":
                with pytest.raises(InvalidValueError, match=name):
                    check_outputs(make_task(name), bad, targets)

    def test_a_perfect_model_has_the_best_figures(self, name: str) -> None:
        _, targets = case(name)
        outputs = perfect(name, targets)
        for metric in metrics_of_task(name).values():
            best = {"perplexity": 1.0}.get(metric.name, 1.0 if metric.larger_is_better else 0.0)
            figure = metric.finish(contributions_of(metric, outputs, targets), N)
            assert figure == pytest.approx(best, abs=1e-6), metric.name


def perfect(name: str, targets: Tensor) -> Tensor:
    if name == "regression":
        return targets.clone()
    if name in ("binary", "multilabel"):
        return 60 * (2 * targets.float() - 1)
    one_hot = 60.0 * nn.functional.one_hot(targets.clamp(min=0), 5 if targets.dim() > 1 else 4)
    return one_hot.movedim(-1, 1) if name == "segmentation" else one_hot


def figure(name: str, metric: str) -> float:
    outputs, targets = case(name)
    found = metrics_of_task(name)[metric]
    return found.finish(contributions_of(found, outputs, targets), N)


def test_figures_agree_with_scikit_learn() -> None:
    outputs, targets = case("classification")
    guess, truth = outputs.argmax(1).numpy(), targets.numpy()
    assert figure("classification", "accuracy") == reference.accuracy_score(truth, guess)
    macro = reference.f1_score(truth, guess, average="macro")
    assert figure("classification", "macro_f1") == pytest.approx(macro)
    balanced = reference.balanced_accuracy_score(truth, guess)
    assert figure("classification", "balanced_accuracy") == pytest.approx(balanced)
    outputs, targets = case("binary")
    yes = (outputs[:, 0] > 0).numpy()
    assert figure("binary", "f1") == pytest.approx(reference.f1_score(targets.numpy(), yes))
    outputs, targets = case("multilabel")
    labels = (outputs > 0).numpy()
    micro = reference.f1_score(targets.numpy(), labels, average="micro")
    assert figure("multilabel", "micro_f1") == pytest.approx(micro)
    exact = reference.accuracy_score(targets.numpy(), labels)
    assert figure("multilabel", "exact_match") == pytest.approx(exact)
    outputs, targets = case("regression")
    pair = (targets.double().numpy(), outputs.double().numpy())
    assert figure("regression", "r2") == pytest.approx(reference.r2_score(*pair))
    assert figure("regression", "mae") == pytest.approx(reference.mean_absolute_error(*pair))
    rmse = math.sqrt(reference.mean_squared_error(*pair))
    assert figure("regression", "rmse") == pytest.approx(rmse)
    outputs, targets = case("segmentation")
    used = (targets != IGNORED).flatten().numpy()
    guess = outputs.argmax(1).flatten().numpy()[used]
    truth = targets.flatten().numpy()[used]
    iou = reference.jaccard_score(truth, guess, average="macro")
    assert figure("segmentation", "mean_iou") == pytest.approx(iou)
    outputs, targets = case("language_model")
    loss = cross_entropy(outputs.transpose(1, 2), targets, ignore_index=IGNORED)
    assert figure("language_model", "perplexity") == pytest.approx(math.exp(float(loss)))


def test_the_area_under_the_curve_is_that_of_all_records() -> None:
    """Ties, batches and clients; the planted mean of the clients' figures differs."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.integers(-3, 4, 200) / 7.0)
    truth = torch.from_numpy((rng.random(200) < 0.5 + logits.numpy()).astype(np.int64))
    auc = metrics_of_task("binary")["auc"]
    ends = [0, 30, 31, 200]
    parts = [
        contributions_of(auc, logits[a:b, None], truth[a:b]) for a, b in itertools.pairwise(ends)
    ]
    expected = reference.roc_auc_score(truth.numpy(), logits.numpy())
    assert auc.finish(joined(auc, parts), 200) == pytest.approx(expected, abs=1e-12)
    clients = [
        Scores({"auc": auc.finish(part, len(part))}, {"auc": part}, len(part), 0.0)
        for part in parts
    ]
    assert combined_scores([auc], clients)["auc"] == pytest.approx(expected, abs=1e-12)
    assert math.isnan(clients[1].metrics["auc"])  # one record has one class
    mean = (clients[0].metrics["auc"] + clients[2].metrics["auc"]) / 2
    assert mean != pytest.approx(expected, abs=1e-3)
    assert math.isnan(auc.finish(torch.tensor([[math.nan, 1.0], [0.0, 0.0]]), 2))
    with pytest.raises(InvalidValueError, match=r'combine = .clients.: must be "records"'):
        Metric("median", whole=True)


def test_a_mean_of_clients_r2_would_be_another_figure() -> None:
    """The sums of r2 matter: the planted mean of two halves differs."""
    outputs, targets = case("regression")
    r2 = metrics_of_task("regression")["r2"]
    halves = [
        r2.finish(contributions_of(r2, outputs[a:b], targets[a:b]), b - a)
        for a, b in ((0, 11), (11, N))
    ]
    assert np.mean(halves) != pytest.approx(figure("regression", "r2"), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("classification", np.array([0.5, 1.636]), "regression"),
        ("classification", np.array([0, 7]), "targets, record 1 = 7: must be in 0..2"),
        ("classification", np.array([0, -1]), "record 1 = -1"),
        ("classification", np.zeros((2, 2), int), "one whole number"),
        ("binary", np.array([0, 1, 2]), "record 2 = 2: must be in 0..1"),
        ("multilabel", np.array([0, 1]), "[records, labels]"),
        ("multilabel", np.array([[0.0, 0.5]]), "record 0 = 0.5: must be 0 or 1"),
        ("regression", np.array([1.0, np.nan]), "record 1 = nan: must be a finite number"),
        ("regression", np.array(["a"]), "must be numbers"),
        ("segmentation", np.zeros((2, 3, 3)), "whole numbers"),
        ("segmentation", np.full((2, 3, 3), 3), "record 0 = 3"),
        ("language_model", np.full((2, 3), IGNORED), "at least one position"),
    ],
)
def test_targets_that_do_not_fit_are_one_line(name: str, targets: NDArray[Any], said: str) -> None:
    classes = 3 if name in ("classification", "segmentation", "language_model") else None
    with pytest.raises(InvalidValueError) as caught:
        check_targets(make_task(name, classes=classes), targets)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_class_weights_that_would_be_ignored_are_refused() -> None:
    weight = torch.tensor([1.0, 9.0])
    for loss in (nn.CrossEntropyLoss(weight=weight), nn.NLLLoss(weight=weight)):
        with pytest.raises(InvalidValueError, match="cancel"):
            make_task("own", loss=loss, metrics=[Metric("m")])
        with pytest.raises(InvalidValueError, match="cancel"):
            make_task(loss=loss)
    plain = nn.CrossEntropyLoss()
    assert check_loss(plain) is plain
    summed = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    assert check_loss(summed) is summed  # a sum keeps the weight of each record


def test_names_units_and_own_parts() -> None:
    assert make_task("language-model").name == "language_model"
    made = make_task("regression", metrics=["rmse", "r2"], unit="mg/dl")
    assert [m.label for m in made.metrics] == ["rmse [mg/dl]", "r2"]
    own = make_task("own", loss=cross_entropy, metrics=[Metric("mine")])
    assert isinstance(own, Task)
    for bad in (
        {"name": "clustering"},
        {"name": "own"},
        {"name": "regression", "metrics": ["accuracy"]},
        {"name": "regression", "classes": 3},
        {"name": "binary", "classes": 3},
        {"name": "classification", "unit": "km"},
        {"name": "regression", "metrics": ["mae", "mae"]},
    ):
        with pytest.raises(InvalidValueError) as caught:
            make_task(**bad)  # type: ignore[arg-type]
        assert caught.value.field.startswith("task.")


def test_a_metric_that_returns_a_mean_is_refused() -> None:
    outputs, targets = case("classification")
    mean = Metric("mine", contributions=lambda o, t: (o.argmax(1) == t).double().mean())
    with pytest.raises(InvalidValueError, match="one score for each record"):
        contributions_of(mean, outputs, targets)


def test_one_logit_is_never_scored_by_argmax() -> None:
    outputs, targets = case("binary")
    with pytest.raises(InvalidValueError, match=r'task.name = "binary"'):
        check_outputs(TASKS["classification"], outputs, targets)
    with pytest.raises(InvalidValueError, match=r'task.name = "classification"'):
        check_outputs(TASKS["binary"], torch.zeros(N, 2), targets)
