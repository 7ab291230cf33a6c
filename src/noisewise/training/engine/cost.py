"""When a layer's per-sample gradients are worth materialising: a cost model of one CPU core."""

from __future__ import annotations

__all__ = ["prefer_ghost", "records_at_once"]

# Nanoseconds, measured on one core with AVX-512 (MKL); only their ratios matter.
_SINGLE_FLOP = 0.012  # float32 batched products of the usual sizes
_DOUBLE_FLOP = 0.02
_ROW_VALUE = 1.4  # one value of a materialised gradient: to float64, its norm, its sum
_CONVERTED_VALUE = 0.8  # one activation or output gradient to float64

_CHUNK_BYTES = 1_400_000  # patches of this size stay in a core's second-level cache


def prefer_ghost(positions: int, inputs: int, outputs: int) -> bool:
    """Whether norms from Gram matrices and one product for the sum cost less than gradients.

    For one record and a matrix [outputs, inputs] that is used at T positions: Gram matrices take
    2 T^2 (inputs + outputs) operations and the sum 2 T inputs outputs, in float64; materialising
    takes the latter in float32 and handles inputs x outputs values.
    """
    size, sides = inputs * outputs, inputs + outputs
    if positions == 1:
        return True
    ghost = (
        2 * _DOUBLE_FLOP * positions * (positions * sides + size)
        + _CONVERTED_VALUE * positions * sides
    )
    return ghost < 2 * _SINGLE_FLOP * positions * size + _ROW_VALUE * size


def records_at_once(bytes_of_one: int) -> int:
    """How many records' patches to build before they are used."""
    return max(1, min(64, _CHUNK_BYTES // max(1, bytes_of_one)))
