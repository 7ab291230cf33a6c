"""Limit BLAS to one thread for small matrices, where more threads are slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

__all__ = ["one_blas_thread"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit numpy's BLAS to one thread inside the ``with`` block; torch keeps its threads.

    On two busy cores, a second thread made the eigenvalues of a 60 x 60 matrix 4 times slower, and
    those of a 16 x 16 matrix up to 100 times slower.
    """
    with threadpool_limits(1, user_api="blas"):
        yield
