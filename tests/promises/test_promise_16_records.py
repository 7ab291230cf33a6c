"""Guarantee 16 of docs/privacy.md: one record decides about itself only.

The tests fuzz one record and compare the others.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import decimal
import io
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from noisewise.data import csv_records
from noisewise.errors import InvalidValueError
from noisewise.site.site_records import inputs_and_targets, read_records, usable_records
from noisewise.training.local import TensorData

N, COLUMNS, CLASSES = 7, 4, 3
HEADER = b"a,b,target,c,d"
Load = Callable[[Path], TensorData]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of bad records are not logged one by one."""
    caplog.set_level(logging.CRITICAL + 1, "noisewise.site")


def load_table(path: Path) -> TensorData:
    """As a site reads its file."""
    arrays = read_records(path, "target", "data.file")
    return usable_records(
        arrays["inputs"], arrays["targets"], (COLUMNS,), CLASSES, "data", images=True
    )


def sound_lines() -> list[bytes]:
    values = np.random.default_rng(0).standard_normal((N, COLUMNS))
    lines = []
    for number, (a, b, c, d) in enumerate(values.tolist()):
        cells = f"{a!r},{b:.3f},{number % CLASSES},{c:.2e},{round(100 * d)}"
        lines.append(cells.encode())
    lines[3] = b'"1.5", 2,"2",3 ,\t4'  # quotes and blanks are allowed
    return lines


LINES = sound_lines()
TOKENS = [
    b'"', b'""', b"'", b"\r", b"\x00", b",", b",,", b";", b"\xef\xbb\xbf", b"\xff", b"\xc3", b" ",
    b"\t", b"\x0b", b"\x0c", b"\x1a", b"\x1c", b"\x1b[31m", b"\x85", "٣".encode(), "é".encode(),
    "\u2028".encode(), "\u00a0".encode(), b"nan", b"inf", b"-Infinity", b"1e999", b"-1e999",
    b"1e39", b"1e-999", b"0x10", b"1_000", b"\\", b"#", b"True", b"-0", b"+", b"e", b".", b"-1",
    b"3", b"1.5", b"9" * 30, b"9" * 2000, b"=1+1", b"1d5", b"1,5",
    b'"\r"', b'"a""b', b"\\\"",
]  # fmt: skip


def hostile_line(rng: random.Random) -> bytes:
    """A line that somebody could write into a table; a line has no newline."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(40)).replace(b"\n", b"")
    if kind == 1:
        return rng.choice(TOKENS) * rng.choice([1, 1, 2, 700])
    if kind == 6:  # two records in one line
        return rng.choice(TOKENS).join(rng.choices(LINES, k=2))
    line = bytearray(rng.choice(LINES))
    if kind == 2:
        cells = bytes(line).split(b",")
        cells[rng.randrange(len(cells))] = rng.choice(TOKENS)
        return b",".join(cells)
    if kind == 3:
        start = rng.randrange(len(line))
        del line[start : start + rng.randrange(1, 9)]
        return bytes(line)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(line) + 1)
        line[place:place] = rng.choice(TOKENS)
    return bytes(line)


def write_table(path: Path, lines: list[bytes], rng: random.Random) -> None:
    end = rng.choice([b"\n", b"\r\n"])
    start = rng.choice([b"", b"\xef\xbb\xbf"])
    last = rng.choice([b"", end])  # the last line may lack its end
    path.unlink(missing_ok=True)  # a new file is faster to write than an old one
    path.write_bytes(start + end.join([HEADER, *lines]) + last)


def check_rest(found: TensorData, place: int, rest: TensorData, what: object) -> int:
    """All other records are there, bit for bit, in order; returns whether the fuzzed one is."""
    assert (found.inputs.dtype, found.targets.dtype) == (torch.float32, torch.int64), what
    assert found.inputs.is_contiguous(), what
    extra = len(found) - len(rest)
    assert extra in (0, 1), f"{what!r}: {len(found)} records beside {len(rest)} others"
    keep = [i for i in range(len(found)) if not (extra and i == place)]
    inputs, targets = found.inputs[keep].numpy(), found.targets[keep].numpy()
    assert inputs.tobytes() == rest.inputs.numpy().tobytes(), what
    assert targets.tobytes() == rest.targets.numpy().tobytes(), what
    return extra


def check_tables(load: Load, folder: Path, cases: int) -> int:
    """Fuzz one line of a table; returns how often the fuzzed record was a sound one."""
    rng, path, kept = random.Random(16), folder / "table.csv", 0
    path.write_bytes(b"\n".join([HEADER, *LINES]))
    whole = load_table(path)
    assert len(whole) == N
    others = [[i for i in range(N) if i != place] for place in range(N)]
    rests = [TensorData(whole.inputs[keep], whole.targets[keep]) for keep in others]
    for _ in range(cases):
        place, line = rng.randrange(N), hostile_line(rng)
        lines = [*LINES[:place], line, *LINES[place + 1 :]]
        write_table(path, lines, rng)
        kept += check_rest(load(path), place, rests[place], line)
    return kept


def test_a_fuzzed_line_changes_no_other_record(tmp_path: Path) -> None:
    kept = check_tables(load_table, tmp_path, 12_000)
    assert 500 < kept < 6_000, "the cases are all alike"


def parsed(lines: Iterator[str] | list[str]) -> TensorData:
    """Records by Python's csv, as a table was read before lines were parsed one by one."""
    rows = csv.reader(lines)
    next(rows)
    inputs, targets = [], []
    for row in rows:
        if not row:
            continue
        label = row.pop(2).strip() if len(row) == COLUMNS + 1 else "-"
        targets.append(int(label) if label.isdecimal() and len(label) < 19 else -1)
        values = [np.nan] * COLUMNS
        if len(row) == COLUMNS:
            for number, cell in enumerate(row):
                with contextlib.suppress(ValueError):
                    values[number] = float(cell)
        inputs.append(values)
    x = np.array(inputs, dtype=np.float64)
    return usable_records(x, np.array(targets), (COLUMNS,), CLASSES, "data", images=True)


def whole_file(path: Path) -> TensorData:
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        return parsed(file)


def any_newline(path: Path) -> TensorData:
    text = path.read_text(encoding="utf-8-sig", errors="replace").replace('"', "")
    return parsed(text.splitlines())


def strict_text(path: Path) -> TensorData:
    path.read_text(encoding="utf-8")
    return load_table(path)


def keeps_the_first(path: Path) -> TensorData:
    found = load_table(path)
    return TensorData(found.inputs[: N - 1], found.targets[: N - 1])


def scaled_by_all(path: Path) -> TensorData:
    found = load_table(path)
    return TensorData(found.inputs / found.inputs.abs().max(), found.targets)


@pytest.mark.parametrize(
    "flaw", [whole_file, any_newline, strict_text, keeps_the_first, scaled_by_all]
)
def test_planted_readers_in_which_a_line_decides_about_others_are_seen(
    flaw: Load, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, csv.Error, UnicodeDecodeError)):
        check_tables(flaw, tmp_path, 2_000)


@pytest.mark.parametrize(
    ("line", "sound"),
    [
        (b"1,2,0,3,4", True), (b" 1 ,\t2,0 ,3,4", True), (b"+1.,-.5,0,1e2,1E-3", True),
        (b'"1","2","0","3","4"', True), (b"1,2,0,3,4\r", True), (b"01,2,00,3,4", True),
        (b"1e-999,2,0,3,4", True), (b"1,2,0,3," + b"4" * 30, True),
        (b"nan,2,0,3,4", False), (b"inf,2,0,3,4", False), (b"1e999,2,0,3,4", False),
        (b"1e39,2,0,3,4", False), (b"0x10,2,0,3,4", False), (b"1_000,2,0,3,4", False),
        ("٣,2,0,3,4".encode(), False), (b"1,2,\xd9\xa0,3,4", False), (b"1,2,0,3", False),
        (b"1,2,0,3,4,5", False), (b",2,0,3,4", False), (b"1,2,,3,4", False),
        (b"1,2,3,3,4", False), (b"1,2,-1,3,4", False), (b"1,2,1.5,3,4", False),
        (b"1,2\r,0,3,4", False), (b"1,2,0,3,4\r\r", False), (b"\x001,2,0,3,4", False),
        (b'"1,2,0,3,4', False), (b'1,2,0,3,"4', False), (b'1,2,0,3,"4\r"', False),
        (b"\xef\xbb\xbf1,2,0,3,4", False), (b"1,2,0,3,4" + b" " * 1280, False),
        (b"1,2,0,3,4" + b" " * 1271, True), (b"1,2,0,3," + b"0" * 140_000, False),
        (b"1\x0b,2,0,3,4", False), (b"1 1,2,0,3,4", False), (b'1,2,0,3,4 "x"', False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", [False, True])
def test_the_rule_for_a_line(line: bytes, sound: bool, last: bool, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\n".join([HEADER, b"1,1,1,1,1", line, *([] if last else [b"2,2,2,2,2"])]))
    if last and line.endswith(b"\r") and sound:
        return  # a carriage return is part of a line's end before a newline only
    assert load_table(path).targets.tolist() == [1, *([0] if sound else []), *([] if last else [2])]


def test_blank_lines_are_no_records_and_a_table_may_be_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(HEADER + b"\r\n\r\n  \t\n1,2,0,3,4\n\n")
    with caplog.at_level(logging.WARNING, "noisewise.site"):
        assert len(load_table(path)) == 1
    assert not caplog.records
    for content in (HEADER, HEADER + b"\n", HEADER + b"\n\n", HEADER + b"\nx"):
        path.write_bytes(content)
        found = load_table(path)
        assert (tuple(found.inputs.shape), tuple(found.targets.shape)) == ((0, COLUMNS), (0,))


def test_lines_and_their_limit_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading in pieces gives what splitting the whole file at its newlines would."""
    monkeypatch.setattr(csv_records, "_SKIP_BYTES", 3)
    rng = random.Random(5)
    for _ in range(20_000):
        limit, content = rng.randrange(1, 9), bytes(rng.choices(b"a\r\n,", k=rng.randrange(30)))
        *ended, last = content.split(b"\n")
        lines = [line.removesuffix(b"\r") for line in ended] + ([last] if last else [])
        expected = [line if len(line) <= limit else None for line in lines]
        assert list(csv_records._lines(io.BytesIO(content), limit)) == expected, (content, limit)


def test_memory_for_a_line_is_bounded(tmp_path: Path) -> None:
    """A line of 300 million bytes is read in pieces."""
    import tracemalloc

    path = tmp_path / "table.csv"
    with open(path, "wb") as file:
        file.write(HEADER + b"\n1,2,0,3,4\n")
        file.seek(300_000_000, 1)  # a hole in the file: zeros that need no disk
        file.write(b"\n5,6,1,7,8\n")
    tracemalloc.start()
    found = load_table(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.targets.tolist() == [0, 1]
    assert peak < 4_000_000


def hostile_objects() -> list[object]:
    class Raises:
        def __array__(self, *args: object, **more: object) -> Any:
            raise RuntimeError("no array")

    endless: list[object] = []
    endless.append(endless)
    right = np.ones(COLUMNS)
    return [
        None, "x", "1", b"\xff", "", [], [1], [1, 2, 3, "x"], [1, 2, 3, "4"], [1, 2, 3, None],
        ["1", "2", "3", "٤"], ["1", "2", "1_0", "nan"], [1, 2, [3], 4], [[1, 2, 3, 4]], {}, {1, 2},
        object(), 1j, [1j, 2, 3, 4], 10**400, [10**400, 2, 3, 4], [2**70, 2, 3, 4], 2**70, Raises(),
        endless, right * np.nan, right * 1e300, right[:3], right.astype(str), right.astype(object),
        right.astype(bool), right.astype(np.uint8), right.astype(np.longdouble), right.astype("S9"),
        np.ma.masked_array(right, mask=[1, 0, 0, 0]), np.array(1.0), np.zeros((COLUMNS, 0)),
        torch.ones(COLUMNS), torch.ones(COLUMNS, requires_grad=True), int, ...,
        torch.ones(COLUMNS).to_sparse(), torch.ones(COLUMNS, dtype=torch.bfloat16), range(4),
        decimal.Decimal("1"), [decimal.Decimal("NaN")] * 4, iter([1, 2, 3, 4]), slice(1), (1, 2),
        datetime.date(2026, 1, 1), [datetime.date(2026, 1, 1)] * 4,
        float("nan"), float("inf"), -1, 3, 2, 2.0, 1.5, True, np.float32(1), np.uint8(200), 2**63,
        2**64, -(2**63), np.datetime64("2026"), np.timedelta64(1), np.str_("1"),
    ]  # fmt: skip


class Pairs:
    """A torch ``Dataset`` in everything that counts; it raises at one record."""

    def __init__(self, inputs: list[Any], targets: list[Any], raises: object = None) -> None:
        self.inputs, self.targets, self.raises = inputs, targets, raises

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> object:
        if number == self.raises:
            raise [IndexError, MemoryError, StopIteration, ZeroDivisionError][number % 4]
        return self.inputs[number], self.targets[number]


def load_lists(inputs: list[Any], targets: list[Any]) -> TensorData:
    return usable_records(inputs, targets, (COLUMNS,), CLASSES, "data", images=True)


def load_dataset(inputs: list[Any], targets: list[Any]) -> TensorData:
    return load_lists(*inputs_and_targets(Pairs(inputs, targets), "data.function"))


def load_object_array(inputs: list[Any], targets: list[Any]) -> TensorData:
    x, y = np.empty(len(inputs), dtype=object), np.empty(len(targets), dtype=object)
    for number in range(len(inputs)):
        x[number], y[number] = inputs[number], targets[number]
    return usable_records(x, y, (COLUMNS,), CLASSES, "data", images=True)


def load_stacked(inputs: list[Any], targets: list[Any]) -> TensorData:
    """Planted: numpy chooses one shape and type for all records."""
    return usable_records(
        np.asarray(inputs), np.asarray(targets), (COLUMNS,), CLASSES, "data", images=True
    )


FORMS: list[Callable[[], list[Any]]] = [
    lambda: list(np.random.default_rng(1).standard_normal((N, COLUMNS))),
    lambda: np.random.default_rng(1).standard_normal((N, COLUMNS)).tolist(),
    lambda: np.random.default_rng(1).integers(-(2**62), 2**62, (N, COLUMNS)).tolist(),
    lambda: list(np.random.default_rng(1).integers(0, 256, (N, COLUMNS), dtype=np.uint8)),
    lambda: list(torch.randn(N, COLUMNS, generator=torch.Generator().manual_seed(1))),
]


def check_lists(load: Callable[[list[Any], list[Any]], TensorData]) -> int:
    """Put every hostile object in the place of a record's input, and of its class."""
    cases = 0
    for form in FORMS:
        inputs, targets = form(), [number % CLASSES for number in range(N)]
        whole = load_lists(inputs, targets)
        assert len(whole) == N
        for place in range(N):
            keep = [i for i in range(N) if i != place]
            rest = TensorData(whole.inputs[keep], whole.targets[keep])
            for value in hostile_objects():
                spoiled = [*inputs[:place], value, *inputs[place + 1 :]]
                labels = [*targets[:place], value, *targets[place + 1 :]]
                check_rest(load(spoiled, targets), place, rest, value)
                check_rest(load(inputs, labels), place, rest, value)
                cases += 2
    return cases


@pytest.mark.parametrize("load", [load_lists, load_dataset, load_object_array])
def test_a_hostile_object_changes_no_other_record(load: Any) -> None:
    assert check_lists(load) > 4_000


def test_planted_stacking_of_all_records_is_seen() -> None:
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        check_lists(load_stacked)


def test_one_record_decides_no_type() -> None:
    """numpy and pandas make text or objects of a whole array for one bad cell."""
    values = np.random.default_rng(2).standard_normal((N, COLUMNS))
    big = np.random.default_rng(2).integers(-(2**62), 2**62, (N, COLUMNS))
    targets = np.arange(N) % CLASSES
    for array in (values, big, values.astype(np.float32)):
        whole = usable_records(array, targets, (COLUMNS,), CLASSES, "data", images=True)
        for place in (0, 3, N - 1):
            keep = [i for i in range(N) if i != place]
            rest = TensorData(whole.inputs[keep], whole.targets[keep])
            spoiled, labels = array.astype(object), targets.astype(object)
            spoiled[place, 1] = labels[place] = "?"
            for x, y in (
                (spoiled, targets),
                (spoiled.astype(str), targets),
                (array, labels),
                (array, labels.astype(str)),
                (spoiled.tolist(), labels.tolist()),
            ):
                found = usable_records(x, y, (COLUMNS,), CLASSES, "data", images=True)
                assert check_rest(found, place, rest, x) == 0
        mixed = big.astype(np.float64)
        mixed[0, 0] = 0.5  # one fraction makes all of them float64
        whole_numbers = usable_records(big, targets, (COLUMNS,), CLASSES, "data")
        check_rest(
            usable_records(mixed, targets, (COLUMNS,), CLASSES, "data", images=True), 0,
            TensorData(whole_numbers.inputs[1:], whole_numbers.targets[1:]), "fraction",
        )  # fmt: skip


def test_a_record_of_a_dataset_may_raise() -> None:
    inputs, targets = FORMS[0](), [number % CLASSES for number in range(N)]
    for place in range(N):
        keep = [i for i in range(N) if i != place]
        rest = load_lists([inputs[i] for i in keep], [targets[i] for i in keep])
        pair = inputs_and_targets(Pairs(inputs, targets, raises=place), "data.function")
        assert check_rest(load_lists(*pair), place, rest, place) == 0


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("names", [("inputs", "targets"), ("test_inputs", "test_targets")])
def test_a_fuzzed_record_of_a_container_changes_no_other(
    suffix: str, names: tuple[str, str], tmp_path: Path
) -> None:
    rng, path = np.random.default_rng(3), tmp_path / f"records{suffix}"
    types = [np.float16, np.float32, np.float64, np.uint8, np.int8, np.int64, np.uint64, np.bool_]
    for x_type in types:
        for y_type in types[:-1]:
            x = (100 * rng.random((N, COLUMNS))).astype(x_type)
            y = (np.arange(N) % CLASSES).astype(y_type)
            whole = usable_records(x, y, (COLUMNS,), CLASSES, "data", images=True)
            place = int(rng.integers(N))
            keep = [i for i in range(N) if i != place]
            rest = TensorData(whole.inputs[keep], whole.targets[keep])
            for array in (x, y):
                for raw in (b"\xff", b"\x00", b"\x7f", b"\x80", rng.bytes(1)):  # NaN, ends, any
                    if x_type is np.bool_ and array is x:
                        continue
                    spoiled = np.asfortranarray(array.copy())
                    spoiled[place] = np.frombuffer(raw * array.itemsize, array.dtype)[0]
                    pair = (spoiled, y) if array is x else (x, spoiled)
                    arrays = dict(zip(names, pair, strict=True))
                    path.unlink(missing_ok=True)
                    save_arrays(path, {"inputs": x, "targets": y, **arrays})
                    read = read_records(path, "target", "data.file")
                    found = usable_records(
                        read[names[0]], read[names[1]], (COLUMNS,), CLASSES, "data", images=True
                    )
                    check_rest(found, place, rest, (x_type, y_type, raw))


def test_no_records_at_all_have_the_same_form() -> None:
    """An empty list or array has lost its shape; a site whose last record goes still answers."""
    for inputs, targets in (
        ([], []),
        (np.array([]), np.array([])),
        (np.empty((0, COLUMNS)), np.empty(0, np.int8)),
        (np.array([], dtype=object), np.array([], dtype=str)),
    ):
        found = usable_records(inputs, targets, (COLUMNS,), CLASSES, "data", images=True)
        assert (tuple(found.inputs.shape), found.inputs.dtype) == ((0, COLUMNS), torch.float32)
        assert (tuple(found.targets.shape), found.targets.dtype) == ((0,), torch.int64)
    for n in (0, 1):  # what is wrong with an array is so for any number of records
        for inputs, targets in (
            (np.empty((n, COLUMNS + 1)), np.empty(n)),
            (np.empty((n, COLUMNS)), np.empty((n, 1))),
            (np.empty((n, COLUMNS), complex), np.empty(n)),
        ):
            with pytest.raises(InvalidValueError):
                usable_records(inputs, targets, (COLUMNS,), CLASSES, "data", images=True)
