"""The rules of recurrent layers: LSTM, GRU and RNN, and their cells.

A layer first multiplies all inputs by its input weights; the recurrence then runs as one function
with its own backward pass. The gradient at the products [b, T, gates] is all that the gradients of
the four parameters need: of the input weights with the inputs, of the recurrent weights with the
states before each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from noisewise.training.engine.layer_interface import (
    CompositeRule,
    LayerOptions,
    NotCoveredError,
    Recorder,
    Value,
    Values,
    row_gradients,
)
from noisewise.training.engine.pieces import Outer, Piece
from noisewise.training.engine.shared_values import SharedValue

__all__ = ["Recurrent", "RecurrentCell"]


class _Lstm(torch.autograd.Function):
    """(products [b, T, 4h], h [b, h], c [b, h], weight [4h, h]) -> states, last c, states before.

    Gates in torch's order: input, forget, cell, output.
    """

    @staticmethod
    def forward(ctx: Any, products: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> Any:
        b, steps, width = products.shape[0], products.shape[1], h.shape[1]
        gates = products.new_empty(steps, b, 4 * width)
        before, cells = products.new_empty(2, steps, b, width).unbind(0)
        states = products.new_empty(steps, b, width)
        right, rows = weight.t(), products.transpose(0, 1)
        for step in range(steps):
            before[step], cells[step] = h, c
            gate = torch.addmm(rows[step], h, right, out=gates[step])
            gate[:, : 2 * width].sigmoid_()
            gate[:, 2 * width : 3 * width].tanh_()
            gate[:, 3 * width :].sigmoid_()
            i, f, g, o = gate.chunk(4, 1)
            c = torch.addcmul(f * c, i, g)
            h = torch.mul(o, torch.tanh(c), out=states[step])
        before = before.transpose(0, 1).contiguous()
        ctx.mark_non_differentiable(before)
        ctx.save_for_backward(gates, cells, c, weight)
        return states.transpose(0, 1).contiguous(), c, before

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (of_states, dc, _), (gates, cells, last, weight) = gradients, ctx.saved_tensors
        steps, b, width = cells.shape
        i, f, g, o = gates.chunk(4, 2)
        bounded = torch.tanh(torch.cat([cells[1:], last[None]]))
        to_cell = o * (1 - bounded.square())
        slopes = torch.stack(
            [g * i * (1 - i), cells * f * (1 - f), i * (1 - g.square()), bounded * o * (1 - o)], 2
        )
        found = gates.new_empty(steps, b, 4, width)
        dh = torch.zeros_like(cells[0])
        rows = of_states.transpose(0, 1)
        for step in reversed(range(steps)):
            dh = dh + rows[step]
            dc = torch.addcmul(dc, dh, to_cell[step])
            torch.mul(dc.unsqueeze(1), slopes[step, :, :3], out=found[step, :, :3])
            torch.mul(dh, slopes[step, :, 3], out=found[step, :, 3])
            dh, dc = torch.mm(found[step].view(b, -1), weight), dc * f[step]
        return found.flatten(2).transpose(0, 1).contiguous(), dh, dc, None


class _Gru(torch.autograd.Function):
    """(products [b, T, 3h], h [b, h], weight [3h, h], bias [3h]) -> states, states before, resets.

    Gates in torch's order: reset, update, new.
    """

    @staticmethod
    def forward(ctx: Any, products: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Any:
        b, steps, width = products.shape[0], products.shape[1], h.shape[1]
        before, new, inner, states = products.new_empty(4, steps, b, width).unbind(0)
        both = products.new_empty(steps, b, 2 * width)
        right, rows = weight.t(), products.transpose(0, 1)
        for step in range(steps):
            before[step] = h
            own = torch.addmm(bias, h, right)
            torch.add(rows[step, :, : 2 * width], own[:, : 2 * width], out=both[step]).sigmoid_()
            inner[step] = own[:, 2 * width :]
            r, z = both[step].chunk(2, 1)
            n = torch.addcmul(rows[step, :, 2 * width :], r, inner[step]).tanh_()
            new[step] = n
            h = torch.addcmul(n, z, h - n, out=states[step])
        before, resets = before.transpose(0, 1).contiguous(), both[:, :, :width].transpose(0, 1)
        resets = resets.contiguous()
        ctx.mark_non_differentiable(before, resets)
        ctx.save_for_backward(before, both, new, inner, weight)
        return states.transpose(0, 1).contiguous(), before, resets

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_states, (before, both, new, inner, weight) = gradients[0], ctx.saved_tensors
        steps, b, width = new.shape
        r, z = both.chunk(2, 2)
        to_new = (1 - z) * (1 - new.square())
        to_update = (before.transpose(0, 1) - new) * z * (1 - z)
        to_inner = to_new * r
        slopes = torch.stack([to_inner * inner * (1 - r), to_update, to_inner], 2)
        found = new.new_empty(steps, b, 3, width)
        dh = torch.zeros_like(new[0])
        rows = of_states.transpose(0, 1)
        for step in reversed(range(steps)):
            dh = dh + rows[step]
            own = torch.mul(dh.unsqueeze(1), slopes[step], out=found[step])
            kept = dh * z[step]
            torch.mul(dh, to_new[step], out=slopes[step, :, 2])  # at the product of the input
            dh = torch.addmm(kept, own.view(b, -1), weight)
        found[:, :, 2] = slopes[:, :, 2]
        return found.flatten(2).transpose(0, 1).contiguous(), dh, None, None


class _Rnn(torch.autograd.Function):
    """(products [b, T, h], h [b, h], weight [h, h], is_relu) -> states, states before."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, h: Tensor, weight: Tensor, is_relu: bool) -> Any:
        b, steps, width = products.shape
        before, states = products.new_empty(2, steps, b, width).unbind(0)
        right, rows = weight.t(), products.transpose(0, 1)
        for step in range(steps):
            before[step] = h
            h = torch.addmm(rows[step], h, right, out=states[step])
            h = h.relu_() if is_relu else h.tanh_()
        before = before.transpose(0, 1).contiguous()
        ctx.mark_non_differentiable(before)
        ctx.save_for_backward(states, weight)
        ctx.is_relu = is_relu
        return states.transpose(0, 1).contiguous(), before

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_states, (states, weight) = gradients[0], ctx.saved_tensors
        slopes = (states > 0).to(states.dtype) if ctx.is_relu else 1 - states.square()
        found = torch.empty_like(states)
        dh = torch.zeros_like(states[0])
        rows = of_states.transpose(0, 1)
        for step in reversed(range(len(states))):
            torch.mul(dh + rows[step], slopes[step], out=found[step])
            dh = torch.mm(found[step], weight)
        return found.transpose(0, 1).contiguous(), dh, None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, ...]:
    return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


class Recurrent(CompositeRule):
    """LSTM, GRU and RNN of any number of layers and directions, without projections."""

    def __init__(self, module: nn.RNNBase, values: Values, options: LayerOptions) -> None:
        self._module, self._values = module, values
        self._name, self._mode = type(module).__name__, module.mode

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """See `CompositeRule`."""
        assert isinstance(module, nn.RNNBase)
        known = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
        return module.proj_size == 0 and all(
            name.rpartition("_l")[0] in known for name in module._parameters
        )

    def call(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        """See `CompositeRule`: (input [b, T, k] or [T, b, k], hx) -> (output, last states)."""
        return self._run(recorder, *args, **kwargs)

    def _run(self, recorder: Recorder, input: Any, hx: Any = None) -> Any:
        module = self._module
        if isinstance(input, PackedSequence) or input.dim() != 3:
            raise NotCoveredError(f"{self._name} receives an input without a batch dimension")
        x = input if module.batch_first else input.transpose(0, 1)
        if x.shape[0] != recorder.axes.records:
            raise NotCoveredError(f"the records are not in the batch dimension of {self._name}")
        is_lstm = self._mode == "LSTM"
        count = module.num_layers * (2 if module.bidirectional else 1)
        if hx is None:
            start = x.new_zeros(count, x.shape[0], module.hidden_size)
            starts = (start, start) if is_lstm else (start,)
        else:
            starts = tuple(hx) if is_lstm else (hx,)
        last: list[tuple[Tensor, ...]] = []
        for layer in range(module.num_layers):
            outputs = []
            for suffix in ("", "_reverse") if module.bidirectional else ("",):
                begin = tuple(start[len(last)] for start in starts)
                y, end = self._direction(recorder, x, f"_l{layer}{suffix}", begin)
                outputs.append(y)
                last.append(end)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
            if module.dropout and layer + 1 < module.num_layers:
                x = functional.dropout(x, module.dropout, module.training)
        ends = tuple(torch.stack(states) for states in zip(*last, strict=True))
        return x if module.batch_first else x.transpose(0, 1), ends if is_lstm else ends[0]

    def _direction(
        self, recorder: Recorder, x: Tensor, suffix: str, start: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: states [b, T, h], and the last ones."""
        is_reverse = suffix.endswith("_reverse")
        x = x.flip(1) if is_reverse else x
        w_in, w_own = self._values["weight_ih" + suffix], self._values["weight_hh" + suffix]
        b_in, b_own = (self._values.get(name + suffix) for name in ("bias_ih", "bias_hh"))
        mode, weight = self._mode, w_own.tensor.detach()
        bias = None if b_in is None or b_own is None else b_in.tensor.detach()
        if bias is not None and b_own is not None and mode != "GRU":
            bias = bias + b_own.tensor.detach()
        products = functional.linear(x, w_in.tensor, bias)
        if products._is_view():
            products = products.clone()
        if not products.requires_grad:  # only the recurrent weights are trained
            products = products.requires_grad_().clone()
        kept = [x]
        if mode == "LSTM":
            states, c, before = _apply(_Lstm, products, *start, weight)
            ends: tuple[Tensor, ...] = (states[:, -1], c)
        elif mode == "GRU":
            own = weight.new_zeros(len(weight)) if b_own is None else b_own.tensor.detach()
            states, before, resets = _apply(_Gru, products, *start, weight, own)
            kept.append(resets)
            ends = (states[:, -1],)
        else:
            states, before = _apply(_Rnn, products, *start, weight, mode == "RNN_RELU")
            ends = (states[:, -1],)

        def gradients(*kept_and_g: Tensor) -> Iterator[Piece]:
            x, before, *resets, g = kept_and_g
            yield from _matrix(w_in, x, g)
            yield from row_gradients(b_in, lambda: g.sum(1))
            if resets:
                width = resets[0].shape[2]
                g = torch.cat([g[..., :-width], g[..., -width:] * resets[0]], 2)
            yield from _matrix(w_own, before, g)
            yield from row_gradients(b_own, lambda: g.sum(1))

        kept.insert(1, before)
        recorder.record(self._name + suffix, kept, products, gradients)
        return states.flip(1) if is_reverse else states, ends


class RecurrentCell(Recurrent):
    """LSTMCell, GRUCell and RNNCell: one step of a recurrent layer."""

    def __init__(self, module: nn.RNNCellBase, values: Values, options: LayerOptions) -> None:
        self._values, self._name, self._width = values, type(module).__name__, module.hidden_size
        if isinstance(module, nn.RNNCell):
            self._mode = "RNN_" + module.nonlinearity.upper()
        else:
            self._mode = "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """See `CompositeRule`."""
        return module._parameters.keys() <= {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}

    def call(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        """See `CompositeRule`: (input [b, k], hx) -> next states."""
        return self._step(recorder, *args, **kwargs)

    def _step(self, recorder: Recorder, input: Any, hx: Any = None) -> Any:
        is_lstm = self._mode == "LSTM"
        if hx is None:
            start = input.new_zeros(len(input), self._width)
            states = (start, start) if is_lstm else (start,)
        else:
            states = tuple(hx) if is_lstm else (hx,)
        for part in (input, *states):
            if isinstance(part, SharedValue):
                raise NotCoveredError(f"an input of {self._name} is a parameter")
            if part.dim() != 2 or len(part) != recorder.axes.records:
                raise NotCoveredError(f"the records are not in the batch dimension of {self._name}")
        _, end = self._direction(recorder, input.unsqueeze(1), "", states)
        return end if is_lstm else end[0]


def _matrix(weight: Value, a: Tensor, g: Tensor) -> Iterator[Piece]:
    if weight.index is not None:
        yield Outer(weight.index, a.unsqueeze(1), g.unsqueeze(1))
