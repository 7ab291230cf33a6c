"""Rewrites of the engine's copy of a model that make it faster and change no gradient."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["pool_before_relu"]

_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def pool_before_relu(module: nn.Module) -> None:
    """Swap ReLU and a following max-pool in every plain `nn.Sequential`.

    relu(max(x)) = max(relu(x)), and the gradients are equal bit for bit: where the maximum is
    positive, both orders send the gradient to the first position with the maximum; elsewhere the
    gradient is 0. ReLU then works on a quarter of the values (for 2x2 pools).
    """
    for part in module.modules():
        if type(part) is not nn.Sequential:
            continue
        layers = list(part)
        swapped = False
        for index in range(len(layers) - 1):
            first, second = layers[index : index + 2]
            if _is_relu(first) and _is_pool(second):
                layers[index : index + 2] = second, first
                swapped = True
        if swapped:
            part.__dict__["forward"] = _chain(layers)


def _chain(layers: list[nn.Module]) -> object:
    def forward(input: Tensor) -> Tensor:
        for layer in layers:
            input = layer(input)
        return input

    return forward


def _is_relu(module: nn.Module) -> bool:
    return type(module) is nn.ReLU and not _has_hooks(module)


def _is_pool(module: nn.Module) -> bool:
    return type(module) in _POOLS and not module.return_indices and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and hooks)
