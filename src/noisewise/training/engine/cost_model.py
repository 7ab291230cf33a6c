"""Cost model of one CPU core, which decides whether to materialise per-record gradients."""

from __future__ import annotations

__all__ = ["is_near", "prefer_ghost", "records_at_once", "values_at_once"]

# Nanoseconds, measured on one core with AVX-512 (MKL). Only their ratios matter.
_SINGLE_FLOP = 0.012  # float32 batched products of the usual sizes
_DOUBLE_FLOP = 0.02
_CONVERTED_VALUE = 0.8  # conversion of one value to float64
_ROW_VALUE = 1.4  # one value of a materialised gradient: conversion, norm and sum
_FAR_ROW_VALUE = 5.0  # the same in memory that the process must request first

_NEAR_VALUES = 3_000_000  # 24 MB, see `fast_gradients._keep_freed_memory`
_CHUNK_BYTES = 1_400_000  # fits into a core's second-level cache


def prefer_ghost(records: int, positions: int, inputs: int, outputs: int) -> bool:
    """Whether norms from Gram matrices ("ghost norms") cost less than materialised gradients.

    For one record and a matrix [outputs, inputs] that is used at T positions: Gram matrices take
    2 T^2 (inputs + outputs) operations and the sum 2 T inputs outputs, in float64. Materialised
    gradients take the latter in float32, and handle inputs x outputs values.

    Args:
        records: number of records in the batch.
        positions: T.
        inputs: columns of the matrix.
        outputs: rows of the matrix.
    """
    if positions == 1:
        return True
    size, sides = inputs * outputs, inputs + outputs
    ghost = (
        2 * _DOUBLE_FLOP * positions * (positions * sides + size)
        + _CONVERTED_VALUE * positions * sides
    )
    value = _ROW_VALUE if is_near(records * size) else _FAR_ROW_VALUE
    return ghost < 2 * _SINGLE_FLOP * positions * size + value * size


def records_at_once(bytes_of_one: int) -> int:
    """How many records to process together, given the bytes of one record's patches."""
    return max(1, min(64, _CHUNK_BYTES // max(1, bytes_of_one)))


def is_near(values: int) -> bool:
    """Whether an array with this number of values fits into memory that the process already has."""
    return values <= _NEAR_VALUES


def values_at_once(values_of_one: int) -> int:
    """How many rows or columns to convert to float64 at a time, given the values of one."""
    return max(1, _NEAR_VALUES // max(1, values_of_one))
