"""One BLAS thread for n x n work: more of them only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

__all__ = ["one_blas_thread"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let numpy's BLAS use one thread inside the block; torch's threads stay as they are.

    On two busy cores the second thread made a 60 x 60 eigenproblem 4 times slower, a 16 x 16 one
    up to 100 times.
    """
    with threadpool_limits(1, user_api="blas"):
        yield
