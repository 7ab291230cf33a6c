"""What happens where a `SharedValue` meets records: one function for each kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional

from noisewise.training.engine.layer_interface import Gradients, Method, NotCoveredError, Recorder
from noisewise.training.engine.pieces import Outer, Piece
from noisewise.training.engine.record_axes import FIRST, RecordAxis
from noisewise.training.engine.shared_values import Roots, SharedValue, values_of

__all__ = ["by_record_gradients", "combine"]

_CHUNK_VALUES = 1 << 24  # per-record gradients of a function at a time: 64 MB


def _methods(*names: str) -> frozenset[object]:
    forms = [
        form
        for name in names
        for form in (name, name + "_", f"__{name}__", f"__r{name}__", f"__i{name}__")
    ]
    return frozenset(
        getattr(owner, form) for owner in (torch, Tensor) for form in forms if hasattr(owner, form)
    )


_ELEMENTWISE = _methods(
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv",
    "pow", "maximum", "minimum", "where", "lerp", "addcmul",
)  # fmt: skip
_EXPANDING = frozenset((Tensor.expand, Tensor.repeat, torch.tile, Tensor.tile, torch.broadcast_to))
_CASTING = frozenset((Tensor.to, Tensor.type_as))
_PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm))


def combine(recorder: Recorder, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of torch that has at least one shared value among its arguments.

    Returns:
        A shared value if no argument depends on records, else a plain tensor with records.

    Raises:
        NotCoveredError: per-record gradients cannot be computed at this point.
    """
    tensors = list(_plain_tensors((args, kwargs)))
    if func in _CASTING and isinstance(args[0], SharedValue):
        tensors = []  # only the type of the other tensor counts
    if not tensors:
        return _of_parameters(recorder, func, args, kwargs)
    name = getattr(func, "__name__", str(func))
    axes = recorder.axes.of(name, [tensor.shape for tensor in tensors])
    inside = [(t, axis) for t, axis in zip(tensors, axes, strict=True) if axis is not None]
    if not inside:
        if any(tensor.requires_grad for tensor in tensors):
            raise NotCoveredError(f"the records are not on an axis of an argument of '{name}'")
        return _of_parameters(recorder, func, args, kwargs)
    if isinstance(args[0], SharedValue) and name.endswith("_") and not name.endswith("__"):
        raise NotCoveredError(f"'{name}' changes a parameter in place")
    if func in _ELEMENTWISE:
        return _elementwise(recorder, func, args, kwargs, inside)
    if func is Tensor.expand_as:
        return _expanded(recorder, args[0], args[1].shape, inside[0][1])
    if func is functional.linear:
        return _linear(recorder, inside[0][1], *args, **kwargs)
    if func in _PRODUCTS and not isinstance(args[0], SharedValue) and args[1].dim() == 2:
        return _product(recorder, name, args[0], args[1], inside[0][1], transposed=True)
    if func in _NORMS:
        return _NORMS[func](*args, **kwargs)
    return _by_record(recorder, func, args, kwargs, inside)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if not isinstance(tree, SharedValue):
            yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _plain_tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _plain_tensors(value)


def _mapped(tree: Any, change: Callable[[SharedValue], Any]) -> Any:
    """The arguments with every shared value replaced."""
    if isinstance(tree, SharedValue):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def _of_parameters(recorder: Recorder, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function of parameters and constants; an expansion to the batch gives records."""
    plain_args = _mapped(args, lambda shared: shared._origin.value)
    plain_kwargs = _mapped(kwargs, lambda shared: shared._origin.value)
    result = func(*plain_args, **plain_kwargs)
    roots = {id(r.tensor): r for s in values_of((args, kwargs)) for r in s._origin.roots}

    def wrapped(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point():
            return recorder.shared(value, tuple(roots.values()))
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return (
                type(value)(wrapped(part) for part in value)
                if type(value) in (tuple, list)
                else value
            )
        return value

    if func in _EXPANDING and isinstance(result, Tensor):
        [axis] = recorder.axes.of("expand", [result.shape])
        if axis is not None:
            return _expanded(recorder, args[0], result.shape, axis)
    return wrapped(result)


def _one_for_each(recorder: Recorder, shared: SharedValue, dims: int, axis: RecordAxis) -> Tensor:
    """The value with ``dims`` axes, one copy for each record along the axis of the records."""
    origin, records = shared._origin, recorder.axes.records
    value = origin.value.detach()
    shape = (1,) * (dims - value.dim()) + tuple(value.shape)
    if len(shape) != dims or shape[axis.dim] != 1:
        raise NotCoveredError("a parameter has an axis where the records are")
    rest = shape[: axis.dim] + shape[axis.dim + 1 :]
    leaf = value.reshape(rest).expand(records, *rest).requires_grad_()

    def gradients(kept: Tensor, g: Tensor) -> Iterator[Piece]:
        yield from origin.pieces(g.reshape(len(g), *origin.value.shape))

    out = recorder.record(
        origin.roots[0].name, [leaf.detach()], leaf.clone(), gradients, ([FIRST], FIRST)
    )
    if axis.factor > 1:
        out = out.unsqueeze(1).expand(records, axis.factor, *rest).flatten(0, 1)
    return out if axis.dim == 0 else out.movedim(0, axis.dim)


def _elementwise(
    recorder: Recorder,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    inside: list[tuple[Tensor, RecordAxis]],
) -> Any:
    every = [*_plain_tensors((args, kwargs)), *(s._origin.value for s in values_of((args, kwargs)))]
    dims = max(tensor.dim() for tensor in every)
    spots = {(dims - tensor.dim() + axis.dim, axis.factor) for tensor, axis in inside}
    if len(spots) != 1:
        raise NotCoveredError("the records are on different axes of an operation's arguments")
    axis = RecordAxis(*spots.pop())
    return func(
        *_mapped(args, lambda shared: _one_for_each(recorder, shared, dims, axis)),
        **_mapped(kwargs, lambda shared: _one_for_each(recorder, shared, dims, axis)),
    )


def _expanded(recorder: Recorder, shared: Any, shape: Sequence[int], axis: RecordAxis) -> Tensor:
    result = _one_for_each(recorder, shared, len(shape), axis)
    if any(have not in (1, want) for have, want in zip(result.shape, shape, strict=True)):
        raise NotCoveredError("a parameter is repeated along an axis of several values")
    return result.expand(tuple(shape))


def _linear(recorder: Recorder, axis: RecordAxis, input: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(input, SharedValue):
        raise NotCoveredError("the weight of 'linear' depends on the records")
    if isinstance(weight, SharedValue):
        out: Any = _product(recorder, "linear", input, weight, axis, transposed=False)
    else:
        out = functional.linear(input, weight)
    return out if bias is None else bias + out


def _product(
    recorder: Recorder,
    name: str,
    x: Tensor,
    weight: SharedValue,
    axis: RecordAxis,
    *,
    transposed: bool,
) -> Tensor:
    """X W^T, or x W if ``transposed``, with the outer products as gradients of W."""
    if axis.dim == x.dim() - 1 or x.dim() < 2:
        raise NotCoveredError(f"'{name}' sums over the records")
    origin = weight._origin
    value = origin.value.detach().requires_grad_()
    out = torch.matmul(x, value) if transposed else functional.linear(x, value)

    def gradients(kept: Tensor, g: Tensor) -> Iterator[Piece]:
        a, b = kept.reshape(len(g), 1, -1, kept.shape[-1]), g.reshape(len(g), 1, -1, g.shape[-1])
        left, right = (a, b) if transposed else (b, a)
        if origin.parameter is not None:
            yield Outer(origin.parameter, right, left)
        else:
            yield from origin.pieces(torch.bmm(left[:, 0].transpose(1, 2), right[:, 0]))

    return recorder.record(origin.roots[0].name, [x], out, gradients, ([axis], axis))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    out: Any = functional.layer_norm(input, list(normalized_shape), None, None, eps)
    out = out if weight is None else weight * out
    return out if bias is None else bias + out


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    out: Any = functional.rms_norm(input, list(normalized_shape), None, eps)
    return out if weight is None else weight * out


def _group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    shape = (-1, *(1 for _ in input.shape[2:]))
    out: Any = functional.group_norm(input, num_groups, None, None, eps)
    out = out if weight is None else weight.reshape(shape) * out
    return out if bias is None else bias.reshape(shape) + out


_NORMS: dict[object, Callable[..., Any]] = {
    functional.layer_norm: _layer_norm,
    torch.layer_norm: lambda *args: _layer_norm(*args[:5]),
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.group_norm: _group_norm,
    torch.group_norm: lambda *args: _group_norm(*args[:5]),
}


def _by_record(
    recorder: Recorder,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    inside: list[tuple[Tensor, RecordAxis]],
) -> Tensor:
    """Any function of torch, differentiated for each record."""
    name = getattr(func, "__name__", str(func))
    if any(axis != FIRST for _, axis in inside):
        raise NotCoveredError(f"the records are not first in an argument of '{name}'")
    origins = [shared._origin for shared in values_of((args, kwargs))]
    leaves = [origin.value.detach().requires_grad_() for origin in origins]
    inputs = [tensor for tensor, _ in inside]

    def call(values: Sequence[Tensor], records: Sequence[Tensor]) -> Any:
        parameters, rows = iter(values), iter(records)
        input_ids = {id(tensor) for tensor in inputs}

        def changed(tree: Any) -> Any:
            if isinstance(tree, SharedValue):
                return next(parameters)
            if isinstance(tree, Tensor):
                return next(rows) if id(tree) in input_ids else tree
            if isinstance(tree, dict):
                return {key: changed(value) for key, value in tree.items()}
            if isinstance(tree, tuple | list):
                return type(tree)(changed(value) for value in tree)
            return tree

        return func(*changed(args), **changed(kwargs))

    versions = [leaf._version for leaf in leaves]
    before = torch.get_rng_state() if recorder.axes.is_trial else None
    out = call(leaves, inputs)
    if versions != [leaf._version for leaf in leaves]:
        raise NotCoveredError(f"'{name}' changes a parameter in place")
    if before is not None and not torch.equal(before, torch.get_rng_state()):
        raise NotCoveredError(f"'{name}' draws random numbers")
    if not isinstance(out, Tensor) or out.shape[:1] != (recorder.axes.records,):
        raise NotCoveredError(f"'{name}' does not return one tensor with the records first")
    rule = by_record_gradients(call, origins, recorder.method(name))
    whose = origins[0].roots[0].name
    return recorder.record(whose, inputs, out, rule, ([FIRST] * len(inputs), FIRST))


def by_record_gradients(
    call: Callable[[Sequence[Tensor], Sequence[Tensor]], Any],
    origins: Sequence[Roots],
    method: Method,
) -> Gradients:
    """Gradients of ``call(values, records)`` at its values, for each record by `torch.func`.

    Args:
        call: the function; gets batches of one record.
        origins: of the values.
        method: whether `vmap` supports the function.
    """
    values = [origin.value.detach() for origin in origins]
    size = sum(value.numel() for value in values)

    def of_one(rows: Sequence[Tensor], g: Tensor) -> tuple[Tensor, ...]:
        batch = [row.unsqueeze(0) for row in rows]
        back = vjp(lambda *parameters: call(parameters, batch), *values)[1]
        return back(g.unsqueeze(0))  # type: ignore[no-any-return]

    def alone(batch: Sequence[Tensor], g: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.requires_grad_() for value in values]
        with torch.enable_grad():
            out = call(leaves, batch)
        return torch.autograd.grad(
            out, leaves, g.unsqueeze(0), allow_unused=True, materialize_grads=True
        )

    def gradients(*kept_and_g: Tensor) -> Iterator[Piece]:
        *kept, g = kept_and_g
        chunk = max(1, min(len(g), _CHUNK_VALUES // max(1, size)))
        by_value: tuple[Tensor, ...] | None = None
        if not method.one_by_one:
            try:
                by_value = vmap(of_one, chunk_size=chunk)(kept, g)
            except RuntimeError:
                if method.is_fixed:
                    raise
                method.one_by_one = True
        if by_value is None:
            rows = [
                alone([tensor[row : row + 1] for tensor in kept], g[row]) for row in range(len(g))
            ]
            by_value = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
        for origin, gradient in zip(origins, by_value, strict=True):
            yield from origin.pieces(gradient)

    return gradients
