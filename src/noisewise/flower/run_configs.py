"""Check the configs that a Flower app passes to `NoiseAware.start`."""

from __future__ import annotations

from flwr.app import ConfigRecord

from noisewise.errors import InvalidValueError
from noisewise.flower.wire import LEARNING_RATE

__all__ = ["check_configs"]

_RATE_KEYS = ("lr", LEARNING_RATE)


def check_configs(
    train_config: ConfigRecord | None, evaluate_config: ConfigRecord | None, learning_rate: float
) -> None:
    """Accept a repeated learning rate; reject what no site accepts.

    Args:
        train_config: may have ``lr`` or ``learning-rate`` with the strategy's own value.
        evaluate_config: must be empty.
        learning_rate: of the strategy.

    Raises:
        InvalidValueError: there is another key, or another rate.
    """
    for key, value in (train_config or {}).items():
        if key not in _RATE_KEYS:
            allowed = (
                "sites accept a learning rate and nothing else from a server: remove this key, and "
                "let each site set it in its own file (batch_size, local_epochs, clip_norm, ...)"
            )
            raise InvalidValueError(f"train_config[{key!r}]", value, allowed)
        if value != learning_rate:
            allowed = (
                f"differs from NoiseAware(learning_rate={learning_rate:g}), which sites receive: "
                "remove train_config, or pass the same number to NoiseAware"
            )
            raise InvalidValueError(f"train_config[{key!r}]", value, allowed)
    for key, value in (evaluate_config or {}).items():
        allowed = "sites accept no setting of an evaluation from a server: remove evaluate_config"
        raise InvalidValueError(f"evaluate_config[{key!r}]", value, allowed)
