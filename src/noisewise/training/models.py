"""Models by name, initialised from a seed: the paper's models, two small ones, and your own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from noisewise.checks import known_name, non_negative_int, positive_int
from noisewise.errors import InvalidValueError
from noisewise.plugins import OR_OWN, load_object
from noisewise.training.resnet import ResNet
from noisewise.training.torch_random import torch_seed

__all__ = ["cnn", "head", "make_model", "mlp", "model_names", "resnet18", "resnet34", "softmax"]

Shape = tuple[int, ...]


def softmax(input_shape: Shape, n_classes: int) -> nn.Module:
    """Softmax regression: one linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), n_classes))


def head(input_shape: Shape, n_classes: int, constant: float = 0.1) -> nn.Module:
    """A linear head for features of norm 1, which starts at zero.

    A bias would have a gradient as large as that of all other weights together, and half of the
    clipping norm would be spent on it. So the head has none; a small constant is appended to the
    features instead.

    Args:
        input_shape: shape of one record's features.
        n_classes: number of outputs.
        constant: the number that is appended; 0 for features that need no offset.
    """
    width = math.prod(input_shape)
    layer = nn.Linear(width + 1, n_classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), nn.ConstantPad1d((0, 1), float(constant)), layer)


def mlp(input_shape: Shape, n_classes: int, hidden: int | Sequence[int] = 64) -> nn.Module:
    """Fully connected layers with ReLU.

    Args:
        input_shape: shape of one record.
        n_classes: number of outputs.
        hidden: width of the hidden layer, or the widths of several.
    """
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    width_in = math.prod(input_shape)
    for width in widths:
        layers += [nn.Linear(width_in, positive_int("hidden", width)), nn.ReLU()]
        width_in = width
    return nn.Sequential(*layers, nn.Linear(width_in, n_classes))


def cnn(input_shape: Shape, n_classes: int) -> nn.Module:
    """The paper's CNN for MNIST and Fashion-MNIST (its table of the model): 28,938 parameters.

    Two 5x5 convolutions that keep the size, with 16 and 32 channels, each followed by ReLU and a
    2x2 pool, then a dense layer. The paper's table has a ReLU after the dense layer too. A
    classifier trained with cross-entropy cannot use it (a class with a logit below 0 would get no
    gradient), so the outputs here are plain logits.
    """
    channels, height, width = _image("cnn", input_shape, smallest=4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), n_classes),
    )


def resnet18(
    input_shape: Shape,
    n_classes: int,
    norm: str = "group",
    groups: int = 32,
    stem: str = "imagenet",
) -> nn.Module:
    """ResNet-18 with GroupNorm: 11,181,642 parameters for 3 channels and 10 classes (the paper)."""
    channels, _, _ = _image("resnet18", input_shape)
    return ResNet((2, 2, 2, 2), channels, n_classes, norm=norm, groups=groups, stem=stem)


def resnet34(
    input_shape: Shape,
    n_classes: int,
    norm: str = "none",
    groups: int = 32,
    stem: str = "imagenet",
) -> nn.Module:
    """ResNet-34 without normalisation: 21,272,778 parameters for 3 channels and 10 classes.

    This is the number in the paper. It belongs to the network with 10 classes and without
    normalisation layers, although the paper trains on the 100 classes of CIFAR-100, for which this
    network has 21,318,948 parameters.
    """
    channels, _, _ = _image("resnet34", input_shape)
    return ResNet((3, 4, 6, 3), channels, n_classes, norm=norm, groups=groups, stem=stem)


_MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "softmax": softmax,
    "head": head,
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "resnet34": resnet34,
}


def model_names() -> tuple[str, ...]:
    """The names that `make_model` accepts, besides ``"package.module:function"``."""
    return tuple(_MODELS)


def make_model(
    name: str | Callable[..., nn.Module],
    input_shape: Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]],
    n_classes: int,
    seed: int,
    **options: object,
) -> nn.Module:
    """Build a model whose initial parameters depend on the seed alone.

    Torch's global generator is not changed.

    Args:
        name: one of `model_names`, or a function of your own (the function itself, or
            ``"package.module:function"``) that takes (input_shape, n_classes, **options) and
            returns a module.
        input_shape: shape of one record, such as (1, 28, 28); for records of several tensors a
            mapping or tuple of shapes, which only a function of your own takes.
        n_classes: number of outputs.
        seed: of the initial parameters.
        **options: passed to the model's function.

    Returns:
        The model.

    Raises:
        InvalidValueError: the name or an option is unknown, or the function returns no module.

    Example:
        >>> model = make_model("cnn", (1, 28, 28), 10, seed=0)
        >>> sum(p.numel() for p in model.parameters())
        28938
    """
    shape = _checked_shape(input_shape)
    positive_int("n_classes", n_classes)
    factory = _factory(name)
    several = isinstance(shape, dict) or any(isinstance(size, tuple) for size in shape)
    if several and factory in _MODELS.values():
        allowed = "takes records of one array: use a model of your own for several"
        raise InvalidValueError("model", name, allowed)
    try:
        inspect.signature(factory).bind(shape, n_classes, **options)
    except TypeError as error:
        raise InvalidValueError(
            "model", name, f"must accept (input_shape, n_classes, **{options}): {error}"
        ) from None
    with torch_seed(non_negative_int("seed", seed), torch.device("cpu")):
        model = factory(shape, n_classes, **options)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InvalidValueError("model", name, f"must return a torch module, not {kind}")
    return model


def _checked_shape(shape: Any) -> Any:
    if isinstance(shape, Mapping):
        return {name: _checked_shape(part) for name, part in shape.items()}
    if isinstance(shape, Sequence | np.ndarray):
        return tuple(map(_checked_shape, shape))
    return positive_int("input_shape", shape)


def _factory(name: str | Callable[..., object]) -> Callable[..., object]:
    if not isinstance(name, str):
        return name
    if ":" not in name:
        return _MODELS[known_name("model", name, _MODELS, OR_OWN)]
    factory = load_object(name, "model")
    if not callable(factory):
        raise InvalidValueError("model", name, "must name a function or a class")
    return factory


def _image(model: str, shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise InvalidValueError(
            "input_shape",
            shape,
            f"must be (channels, height, width) of at least {smallest} x {smallest} for {model}",
        )
    return shape[0], shape[1], shape[2]
