"""The trained model of a run: as a module, as named tensors, and in ``model.safetensors``.

The file holds what `torch.nn.Module.load_state_dict` takes: trained parameters, frozen parameters
and buffers. A server of a real federation knows the trained parameters only, so its file has no
others. Its metadata list the trained parameters in the order of the run's parameter vector.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from noisewise.errors import InvalidValueError
from noisewise.storage import write_atomic
from noisewise.training.parameters import ParameterLayout

__all__ = [
    "MODEL_FILE",
    "PRETRAINED",
    "ModelStructure",
    "TrainedModel",
    "load_model",
]

MODEL_FILE = "model.safetensors"
PRETRAINED = "pretrained"
"""Folder for models with a method ``save_pretrained``."""

_OLD_NAME = "theta"  # older files hold one vector of this name and no metadata
_log = logging.getLogger(__name__)
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class ModelStructure:
    """What gives a run's parameter vector its names.

    Attributes:
        layout: of the trained parameters.
        module: the model; None at a server of a real federation, which knows the layout only.
    """

    layout: ParameterLayout
    module: nn.Module | None = None

    @classmethod
    def of(cls, model: nn.Module) -> ModelStructure:
        """The structure of a model."""
        return cls(ParameterLayout.of(model), model)

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """Copies of all tensors by name, as `torch.nn.Module.load_state_dict` takes them.

        Args:
            theta: [p] trained parameters.
        """
        trained = self.layout.unflatten(theta.detach().cpu())
        if self.module is None:
            return {name: value.clone() for name, value in trained.items()}
        first_names = {id(p): name for name, p in self.module.named_parameters()}
        aliases = {  # a parameter that two layers share has one value in theta
            name: first_names[id(p)]
            for name, p in self.module.named_parameters(remove_duplicate=False)
        }
        return {
            name: _value(trained.get(aliases.get(name, name)), tensor)
            for name, tensor in self.module.state_dict().items()
            if isinstance(tensor, Tensor)
        }

    def new_module(self, theta: Tensor) -> nn.Module | None:
        """A copy of the model with the trained parameters, in evaluation mode; None without one."""
        if self.module is None:
            return None
        module = copy.deepcopy(self.module)
        self.layout.load(module, theta)
        return module.eval()


def _value(trained: Tensor | None, tensor: Tensor) -> Tensor:
    """The trained value of a tensor, or its own, without memory that another tensor shares."""
    source = tensor if trained is None else trained
    return source.detach().to("cpu", tensor.dtype, copy=True).contiguous()


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The trained parameters of a run.

    Attributes:
        source: [p] the parameters, or the ``model.safetensors`` that holds them.
        structure: names, shapes and the model; None if only the file is known.
    """

    source: Tensor | Path
    structure: ModelStructure | None = None

    def __reduce__(self) -> tuple[Callable[..., TrainedModel], tuple[bytes | Path]]:
        """Pass the parameters between processes, without the model: it may not survive that."""
        if isinstance(self.source, Path):
            return TrainedModel, (self.source,)
        return _unpacked, (save_tensors({_OLD_NAME: self.source.detach().cpu().contiguous()}),)

    def sizes(self) -> tuple[int, int] | None:
        """The numbers of all parameters and of the trained ones; None without the model."""
        if self.structure is None or self.structure.module is None:
            return None
        total = sum(parameter.numel() for parameter in self.structure.module.parameters())
        return total, self.structure.layout.size

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name, as `torch.nn.Module.load_state_dict` takes them.

        Raises:
            InvalidValueError: the file is missing or damaged, or has no names (older files).
        """
        if isinstance(self.source, Path):
            tensors = _read(self.source)
            if _trained_names(self.source) is not None:
                return tensors
            theta = tensors[_OLD_NAME]
        else:
            theta = self.source
        if self.structure is None:
            raise InvalidValueError(
                "model", None, "must be given to name the parameters: noisewise.load_model(folder, "
                "model)",
            )  # fmt: skip
        return self.structure.state_dict(theta)

    def new_module(self) -> nn.Module:
        """A new module with the trained parameters, in evaluation mode.

        Raises:
            InvalidValueError: the model's code is not known, or the file is missing or damaged.
        """
        module = None if self.structure is None else self.structure.module
        if module is None:
            allowed = "must be given: noisewise.load_model(folder, model) fills your own module"
            raise InvalidValueError("model", None, allowed)
        if isinstance(self.source, Path):
            return load_model(self.source.parent, copy.deepcopy(module)).eval()
        assert self.structure is not None
        new_module = self.structure.new_module(self.source)
        assert new_module is not None
        return new_module

    def write(self, folder: Path) -> None:
        """Write ``model.safetensors``, and ``pretrained`` if the model has `save_pretrained`."""
        assert isinstance(self.source, Tensor)
        assert self.structure is not None
        header = {"version": 2, "trained": list(self.structure.layout.names)}
        payload = save_tensors(self.state_dict(), metadata={"noisewise": json.dumps(header)})
        write_atomic(folder / MODEL_FILE, payload)
        if callable(getattr(self.structure.module, "save_pretrained", None)):
            _write_pretrained(self.new_module(), folder / PRETRAINED)


def _unpacked(payload: bytes) -> TrainedModel:
    return TrainedModel(load_tensors(payload)[_OLD_NAME])


def _write_pretrained(module: nn.Module, folder: Path) -> None:
    """Call the model's own `save_pretrained`, as peft and transformers define it."""
    save: Any = module.save_pretrained
    part = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with _without_progress():
            save(str(part))
    except Exception as error:  # in the code of another library; the run has ended well
        _log.warning("%s: save_pretrained failed (%s: %s); %s holds the same parameters",
                     folder, type(error).__name__, error, MODEL_FILE)  # fmt: skip
        shutil.rmtree(part, ignore_errors=True)
        return
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    """Hide the progress bars of transformers, if it is loaded, and restore them at the end."""
    logging_of = sys.modules.get("transformers.utils.logging")
    is_shown: Any = getattr(logging_of, "is_progress_bar_enabled", lambda: False)
    if logging_of is None or not is_shown():
        yield
        return
    logging_of.disable_progress_bar()
    try:
        yield
    finally:
        logging_of.enable_progress_bar()


def _trained_names(file: Path) -> tuple[str, ...] | None:
    """The names of the trained parameters in the order of theta; None for an older file."""
    try:
        with safe_open(file, framework="pt") as opened:
            header = (opened.metadata() or {}).get("noisewise")
        return None if header is None else tuple(json.loads(header)["trained"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from error


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> InvalidValueError:
    allowed = f"must hold {MODEL_FILE} of a run that changed its model ({error})"
    return InvalidValueError("folder", str(file.parent), allowed)


def load_model(folder: Path | str, model: AnyModule) -> AnyModule:
    """Fill a model with the trained parameters of a run.

    Args:
        folder: of the run, or its ``model.safetensors``; also of a client of `Alone`
            (``clients/...``) and of a server of a real federation.
        model: with the structure of the run's model. Frozen parameters and buffers that the file
            does not hold (a server's) keep their values.

    Returns:
        The same model, changed.

    Raises:
        InvalidValueError: the file is missing or damaged, or names or shapes are others; the model
            is then not changed.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from noisewise.training.models import make_model
        >>> made = make_model("softmax", (1, 8, 8), 10, seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     structure = ModelStructure.of(made)
        ...     TrainedModel(torch.ones(650), structure).write(Path(folder))
        ...     float(load_model(folder, made)[1].bias[0])
        1.0
    """
    file = Path(folder)
    file = file / MODEL_FILE if file.is_dir() else file
    if not file.exists():
        allowed = f"must be the folder of a run that changed its model, with {MODEL_FILE}"
        raise InvalidValueError("folder", str(folder), allowed)
    names, tensors = _trained_names(file), _read(file)
    layout = ParameterLayout.of(model)
    if names is None:
        theta = tensors.get(_OLD_NAME)
        if theta is None or theta.shape != (layout.size,):
            shape = None if theta is None else tuple(theta.shape)
            allowed = f"must have as many trainable parameters as {file}: {shape}"
            raise InvalidValueError("model", f"{layout.size} trainable parameters", allowed)
        layout.load(model, theta)
        return model
    _check(tensors, model, file)
    model.load_state_dict(tensors, strict=False)
    return model


def _check(tensors: Mapping[str, Tensor], model: nn.Module, file: Path) -> None:
    """Raise if the model lacks a tensor of the file, or has a trainable one that the file lacks."""
    expected = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and n not in tensors]
    extra = [name for name in tensors if name not in expected]
    if missing or extra:
        text = f"must be the model of {file}: " + "; ".join(
            f"{fault} {words[:3]}"
            for fault, words in (("not in the file", missing), ("only in the file", extra))
            if words
        )
        raise InvalidValueError("model", type(model).__name__, text)
    for name, tensor in tensors.items():
        if expected[name].shape != tensor.shape:
            allowed = f"must have the shape {tuple(tensor.shape)} of {file}"
            raise InvalidValueError(f"model: {name}", tuple(expected[name].shape), allowed)
