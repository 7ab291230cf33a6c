"""Records the operations of a model's passes and finds those that depend on a row's position.

If an operation is not exact (a sigmoid, for example), torch computes the last values of a tensor
with other instructions than the rest, so a value depends on its position. A model may also branch
on values or draw random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TRACED_RECORDS",
    "NoMasks",
    "Operation",
    "draws_masks",
    "has_no_tails",
    "trace_operations",
]

TRACED_RECORDS = 16
"""Number of records in the smaller one of the two passes that are compared."""

_VECTORS = 128  # bytes: torch's vectorised loops take two registers of at most 64 bytes at a time

OperationPairs = Sequence[tuple["Operation", "Operation"]]
"""Each operation of a pass with `TRACED_RECORDS` records, and the same with twice as many."""

# Operations whose result does not depend on the instructions that compute a value: correctly
# rounded arithmetic, comparisons, copies, and operations on each record's row. The trial in
# `batch_size_check` covers the order of sums inside of rows.
_EXACT = frozenset(
    """abs add alias amax amin arange argmax as_strided bernoulli bitwise_and bitwise_not bitwise_or
    cat ceil clamp clamp_max clamp_min clone constant_pad_nd contiguous copy detach div dropout
    empty empty_like empty_strided eq expand fill flip floor full full_like gather ge gt
    hardtanh hardtanh_backward index index_fill index_put index_select le leaky_relu
    leaky_relu_backward lift_fresh logical_and logical_not logical_or lt masked_fill maximum
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward minimum mul native_dropout native_dropout_backward ne neg
    new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute reflection_pad1d
    reflection_pad2d relu repeat replication_pad1d replication_pad2d reshape resize roll round
    scalar_tensor scatter select select_backward select_scatter sgn sign slice slice_backward
    slice_scatter split split_with_sizes sqrt squeeze stack sub t threshold threshold_backward
    to _to_copy transpose tril triu unbind unfold unfold_backward unsqueeze unsafe_split
    upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward view where zero zeros
    zeros_like _reshape_alias _unsafe_view
    adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward addmm addmv avg_pool2d
    avg_pool2d_backward baddbmm bmm convolution convolution_backward cross_entropy_loss cumsum dot
    embedding embedding_dense_backward linalg_vector_norm linear linear_backward matmul mean
    mkldnn_convolution mkldnn_linear mm mv native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward nll_loss_forward nll_loss_backward
    nll_loss2d_forward nll_loss2d_backward norm sum vdot _log_softmax _log_softmax_backward_data
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _softmax
    _softmax_backward_data""".split()  # noqa: SIM905
)
_BRANCHES = frozenset(
    """_local_scalar_dense equal is_nonzero item masked_select nonzero unique unique2 _unique2
    unique_dim unique_consecutive allclose""".split()  # noqa: SIM905
)
_MASKS = frozenset(("bernoulli", "native_dropout"))
_RANDOM = frozenset(
    """cauchy exponential geometric log_normal multinomial normal poisson rand rand_like randint
    randint_like randn randn_like random randperm rrelu_with_noise uniform
    rrelu_with_noise_functional""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Operation:
    """One operation of a pass.

    Attributes:
        name: of the operation, such as ``relu``.
        shapes: of the tensors that it returns.
        bytes: sizes of the floating-point tensors that it returns.
        is_exact: whether its result is independent of the instructions used.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    is_exact: bool


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else result
        tensors = (
            [value for value in outputs if isinstance(value, Tensor)]
            if isinstance(outputs, (tuple, list))
            else []
        )
        name = _name(func)
        real = [value for value in tensors if value.is_floating_point()]
        self.operations.append(
            Operation(
                name,
                tuple(tuple(value.shape) for value in tensors),
                tuple(value.numel() * value.element_size() for value in real),
                _is_exact(func, name, kwargs),
            )
        )
        return result


class NoMasks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every random mask keep all values, so that passes can be compared."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name == "bernoulli":
            return args[0].fill_(1) if func._schema.is_mutable else torch.ones_like(args[0])
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """``relu`` for ``aten::relu_``; operations of other libraries keep their prefix."""
    space, _, name = str(func._schema.name).partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if space == "aten" else f"{space}::{name}"


def _is_exact(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
        return False  # torch may compute it as one fused operation or as two
    if name == "div" and kwargs.get("rounding_mode") is not None:
        return False
    return name in _EXACT


def trace_operations(run: Callable[[int], object]) -> tuple[OperationPairs, str]:
    """The operations of a computation, and why records must be computed separately, if they must.

    Args:
        run: runs the computation with the given number of records.

    Returns:
        The operations and an empty text, or no operations and the reason.
    """
    traces = []
    for count in (TRACED_RECORDS, 2 * TRACED_RECORDS):
        with _Recorder() as recorder:
            run(count)
        traces.append(recorder.operations)
    names = {operation.name for trace in traces for operation in trace}
    if branching := sorted(names & _BRANCHES):
        return [], f"the model or the loss branches on values ({', '.join(branching)})"
    if drawing := sorted(names & _RANDOM):
        return [], f"the model draws random numbers other than masks ({', '.join(drawing)})"
    pairs = list(zip(*traces, strict=False))
    if len(traces[0]) != len(traces[1]) or any(a.name != b.name for a, b in pairs):
        return [], "the model's operations depend on the number of records"
    return pairs, ""


def draws_masks(pairs: OperationPairs) -> bool:
    """Whether an operation draws a random mask (dropout)."""
    return any(operation.name in _MASKS for operation, _ in pairs)


def has_no_tails(pairs: OperationPairs, count: int) -> bool:
    """Whether every inexact operation on ``count`` records fills whole vector registers."""
    unit = _VECTORS * math.lcm(*range(1, torch.get_num_threads() + 1))
    for single, double in pairs:
        if single.is_exact:
            continue
        for small, large in zip(single.bytes, double.bytes, strict=True):
            if small == large:
                continue  # depends on parameters only: the same in every batch
            if (
                large != 2 * small
                or small % TRACED_RECORDS
                or small // TRACED_RECORDS * count % unit
            ):
                return False
    return True
