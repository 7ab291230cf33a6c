"""Attention masks of Hugging Face `transformers` without branches on the values of records.

`transformers` leaves a mask out if no record of the batch has padding. So what a record contributes
would depend on its neighbours, and the engine would have to compute records one by one, which takes
3 to 5 times as long. While a model is traced, the library makes the same mask for every batch;
inside of `same_masks` it does so too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["same_masks"]

_MODULE, _FUNCTION = "transformers.masking_utils", "is_tracing"
_state = threading.local()


@contextmanager
def same_masks() -> Iterator[None]:
    """Let `transformers`, if it is imported, make the same mask for every batch of one shape.

    Only this thread is affected, and only inside of the block. A version of `transformers` without
    the function that is replaced here works as before, one record at a time.
    """
    module = sys.modules.get(_MODULE)
    original = getattr(module, _FUNCTION, None)
    if original is not None and not hasattr(original, "noisewise"):
        setattr(module, _FUNCTION, _replacement(original))
    outer, _state.active = getattr(_state, "active", False), True
    try:
        yield
    finally:
        _state.active = outer


def _replacement(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_tracing(*args: Any, **kwargs: Any) -> bool:
        return getattr(_state, "active", False) or original(*args, **kwargs)

    is_tracing.__dict__["noisewise"] = True
    return is_tracing
