"""Before a run: do your own parts fit the records, and is the folder that of the same settings?

Mistakes that would show after minutes, in the words of some library, show here in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisewise.data.examples import Examples
from noisewise.errors import InvalidValueError
from noisewise.experiments.config import ExperimentConfig, dump_config, load_config
from noisewise.federation.clients import to_tensors

__all__ = ["check_folder", "check_own_config", "check_own_parts"]

# What may differ between two commands that go on with the same runs.
_FREE = {
    "": {"compare", "method", "seed", "track"},
    "data": {"folder"},
    "training": {"executor", "learning_rate", "ray_address"},
}


_MARKS = ("run.json", "result.json")


def check_folder(config: ExperimentConfig, folder: Path, runs: Iterable[Path]) -> None:
    """Refuse a folder in which some of these runs were begun under another config.

    Runs check themselves, by everything that decides their result; this comes before
    ``config.toml`` is replaced, and names the field.

    Raises:
        InvalidValueError: the first field that differs; or there can be no such folder.
    """
    lowest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if lowest.exists() and not lowest.is_dir():
        raise InvalidValueError(
            "--output", str(folder), f"must be a folder, and {lowest} is a file"
        )
    if not any((run / name).exists() for run in runs for name in _MARKS):
        return
    try:
        known = load_config(folder / "config.toml")
    except InvalidValueError:
        return  # from another version, or damaged: the runs will tell
    here, there = _deciding(config), _deciding(known)
    for field, value in here.items():
        if there.get(field) != value:
            raise InvalidValueError(
                "--output",
                str(folder),
                f"holds runs with {field} = {there.get(field)!r}, not {value!r}; name another "
                "folder by --output, or remove it",
            )


def check_own_config(config: ExperimentConfig, folder: Path) -> None:
    """Refuse a folder of a comparison whose ``config.toml`` no comparison has written.

    It is a comparison's if ``runs`` beside it holds runs, or nothing yet, and if it has no remarks;
    or if it says already what would be written. Else it is yours, and would be lost.

    Raises:
        InvalidValueError: names the file.
    """
    file, runs = folder / "config.toml", folder / "runs"
    if not file.is_file() or file.read_bytes() == dump_config(config).encode():
        return
    lines = file.read_text(errors="replace").splitlines()
    if runs.is_dir() and not any(line.lstrip().startswith("#") for line in lines):
        begun = [run for run in runs.iterdir() if _holds_anything(run)]
        if not begun or any((run / name).exists() for run in begun for name in _MARKS):
            return
    raise InvalidValueError(
        "--output",
        str(folder),
        f"holds a {file.name} that is no comparison's and would be replaced; name another folder, "
        "or move the file",
    )


def _holds_anything(folder: Path) -> bool:
    """Whether a run left more in its folder than a lock; one that could not start does not."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def _deciding(config: ExperimentConfig) -> dict[str, Any]:
    """The fields that decide results, dotted."""
    found: dict[str, Any] = {}
    for name, table in config.model_dump().items():
        if name in _FREE[""]:
            continue
        if isinstance(table, Mapping):
            fields = table.items()
            found |= {f"{name}.{k}": v for k, v in fields if k not in _FREE.get(name, ())}
        else:
            found[name] = table
    return found


def check_own_parts(
    config: ExperimentConfig,
    model: nn.Module,
    loss: Callable[..., Tensor],
    metric: Callable[..., Tensor],
    examples: Examples,
) -> None:
    """Show two records to a model, loss and metric of your own, if the config names any.

    Raises:
        InvalidValueError: names the part that cannot read them.
    """
    training, few = config.training, to_tensors(examples.take(np.arange(min(2, len(examples)))))
    shape, n = tuple(few.inputs.shape), len(few)
    parts: list[tuple[str, str, Callable[[Any], Any], tuple[int, ...] | None, str]] = [
        ("model.name", config.model.name, lambda _: model(few.inputs), None, f"inputs of {shape}"),
        ("training.loss", training.loss, lambda out: loss(out, few.targets), (),
         "the model's outputs and targets, to one number"),
        ("training.metric", training.metric, lambda out: metric(out, few.targets), (n,),
         "the model's outputs and targets, to one number a record"),
    ]  # fmt: skip
    if not any(_is_own(name) for _, name, *_ in parts):
        return
    outputs: Any = None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for field, name, call, wanted, words in parts:
                outputs = _shown(field, name, call, outputs, wanted, words)
    finally:
        model.train(was_training)


def _shown(
    field: str,
    name: str,
    call: Callable[[Any], Any],
    outputs: Any,
    wanted: tuple[int, ...] | None,
    words: str,
) -> Any:
    """The model's outputs, for the parts after it; what a part gives must have the wanted shape."""
    try:
        given = call(outputs)
    except Exception as error:
        raise InvalidValueError(field, name, f"must take {words} ({error})") from error
    if wanted is None:
        return given
    if not isinstance(given, Tensor) or tuple(given.shape) != wanted:
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise InvalidValueError(field, name, f"must take {words}: shape {wanted}, not {what}")
    return outputs


def _is_own(name: str) -> bool:
    return ":" in name and not name.startswith(("torch.", "noisewise."))
