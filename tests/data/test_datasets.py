"""Built-in datasets and record types: values, scaling, copies and errors."""

from __future__ import annotations

import numpy as np
import pytest

from noisewise.data import Dataset, Examples, Scaling, dataset_names, load_dataset
from noisewise.data.examples import IMAGES
from noisewise.errors import InvalidValueError


def examples(n: int = 4, scaling: Scaling | None = None) -> Examples:
    inputs = np.arange(n * 2 * 3 * 3, dtype=np.uint8).reshape(n, 2, 3, 3)
    return Examples(inputs, np.arange(n, dtype=np.int64), scaling)


def test_digits_are_there_without_a_network() -> None:
    digits = load_dataset("digits")
    assert "digits" in dataset_names()
    assert digits.train.inputs.shape == (1797, 1, 8, 8)
    assert digits.train.inputs.dtype == np.float32
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0.0, 1.0)
    assert digits.n_classes == 10
    assert digits.test is None
    own = load_dataset("digits", scaling=Scaling((0.5,), (0.5,)))
    assert own.train.arrays()[0].min() == -1.0
    assert set(digits.train.targets.tolist()) == set(range(10))


def test_arrays_scale_by_the_closed_form() -> None:
    raw = examples()
    ids, targets = raw.arrays()
    assert ids.dtype == np.int64  # whole numbers stay whole unless they are declared to be images
    np.testing.assert_array_equal(ids, raw.inputs)
    plain, _ = examples(scaling=IMAGES).arrays()
    np.testing.assert_array_equal(plain, raw.inputs.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(targets, raw.targets)
    scalar, _ = examples(scaling=Scaling((0.1307,), (0.3081,))).arrays()
    np.testing.assert_allclose(scalar, (raw.inputs / 255 - 0.1307) / 0.3081, rtol=1e-5)
    channels, _ = examples(scaling=Scaling((0.1, 0.2), (0.3, 0.4))).arrays()
    np.testing.assert_allclose(channels[:, 1], (raw.inputs[:, 1] / 255 - 0.2) / 0.4, atol=1e-6)
    np.testing.assert_allclose(channels[:, 0], (raw.inputs[:, 0] / 255 - 0.1) / 0.3, atol=1e-6)
    assert scalar.dtype == np.float32
    real = Examples(np.full((2, 3), 5.0, np.float32), np.zeros(2, np.int64), Scaling((1,), (2,)))
    np.testing.assert_array_equal(real.arrays()[0], np.full((2, 3), 2.0))


def test_nothing_hands_out_a_view() -> None:
    source = examples()
    for part in (source.take([0, 1]), source.take(slice(0, 2)), source.take(np.array([True] * 4))):
        part.inputs[:] = 9
        part.targets[:] = 9
    source.arrays()[0][:] = 9
    source.arrays()[1][:] = 9
    np.testing.assert_array_equal(source.inputs, examples().inputs)
    np.testing.assert_array_equal(source.targets, examples().targets)
    assert len(source.take([])) == 0


def test_take_frees_a_memory_map(tmp_path) -> None:
    np.save(tmp_path / "x.npy", examples().inputs)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    part = Examples(mapped, np.arange(4, dtype=np.int64)).take([2, 0])
    assert type(part.inputs) is np.ndarray
    np.testing.assert_array_equal(part.inputs, examples().inputs[[2, 0]])


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: load_dataset("imagenet"), "dataset"),
        (lambda: Examples(np.zeros((2, 3)), np.zeros(2, np.int64)), "inputs"),
        (lambda: Examples([[1.0]], np.zeros(1, np.int64)), "inputs"),
        (lambda: Examples(np.float32(1).reshape(()), np.zeros(1, np.int64)), "inputs"),
        (lambda: Examples(np.zeros((2, 3), np.float32), np.zeros(3, np.int64)), "targets"),
        (lambda: Examples(np.zeros((2, 3), np.float32), np.zeros(2, np.int32)), "targets"),
        (lambda: Scaling((0.5,), (0.5, 0.5)), "scaling.std"),
        (lambda: Scaling((0.5,), (0.0,)), "scaling.std"),
        (lambda: Scaling((float("nan"),), (1.0,)), "scaling.mean"),
        (lambda: examples(scaling=Scaling((0.5,) * 3, (0.5,) * 3)).arrays(), "scaling.mean"),
        (lambda: Dataset("a", examples(4), None, 3), "targets, record 3"),
        (lambda: Dataset("a", examples(4), None, 4, deal_test=True), "deal_test"),
        (lambda: Dataset("a", examples(4), None, 0), "n_classes"),
    ],
)
def test_bad_values_name_the_field(make: object, field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.field == field
