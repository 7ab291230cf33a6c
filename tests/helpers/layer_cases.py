"""Models with attention, recurrence, volumes and parameters outside of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 4


class Recurrence(nn.Module):
    """A recurrent layer, read at the last step and on average, with its last states."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.cells = kind(5, 6, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        is_first = self.cells.batch_first
        y, last = self.cells(x if is_first else x.transpose(0, 1))
        y = y if is_first else y.transpose(0, 1)
        ends = torch.cat(
            [
                part.mean(dim=(0, 2))[:, None]
                for part in (last if isinstance(last, tuple) else (last,))
            ],
            1,
        )
        return self.head(y[:, -1] + y.mean(1)) + ends.mean(1, keepdim=True)


class Steps(nn.Module):
    """A recurrent cell, called once for each step; its first state comes from the record."""

    def __init__(self, kind: type[nn.RNNCellBase], given: bool = True, **options: object) -> None:
        super().__init__()
        self.cell, self.head = kind(5, 6, **options), nn.Linear(6, CLASSES)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:  # [b, T, 5]
        state = functional.pad(x[:, 0], (0, 1), value=0.5) if self.given else None
        if self.given and isinstance(self.cell, nn.LSTMCell):
            state = (state, 0.5 * state)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class GivenStates(nn.Module):
    """An LSTM whose first states come from the record."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.cells = nn.Linear(5, 6), nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.start(x[:, 0]))[None]
        y, (_, c) = self.cells(x, (h, h * 0.5))
        return self.head(y.mean(1) + c[0])


class Encoder(nn.Module):
    """Position table, class token, encoder layers, cross-attention, layer scale."""

    def __init__(self, batch_first: bool = True, cross: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.batch_first, self.masked = batch_first, masked
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=batch_first) if cross else None
        self.scale, self.head = nn.Parameter(torch.randn(8)), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        x = torch.cat([self.token.expand(len(tokens), -1, -1), x], 1)
        x = x if self.batch_first else x.transpose(0, 1)
        padding, causal = None, None
        if self.masked:
            padding = functional.pad(tokens == 0, (1, 0))
            causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype)
        y = self.encoder(x, mask=causal, src_key_padding_mask=padding)
        if self.cross is not None:
            y = (
                y
                + self.cross(y[:3] if not self.batch_first else y[:, :3], x, x)[0].mean(
                    dim=1 if self.batch_first else 0, keepdim=True
                )
                * self.scale
            )
        return self.head(y.mean(1 if self.batch_first else 0))


class Positions(nn.Module):
    """Position numbers without a batch axis, or with a batch of 1 as in BERT and GPT-2."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.batch = batch
        self.embed, self.table = nn.Embedding(11, 5), nn.Embedding(6, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        ids = torch.arange(tokens.shape[1])
        places = self.norm(self.table(ids[None] if self.batch else ids))
        return self.head(torch.tanh(self.embed(tokens) + places).mean(1))


class TimeFirst(nn.Module):
    """Layers work on [T, b, k]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [b, 3, 5]
        return self.head(torch.tanh(self.norm(self.fc(x.transpose(0, 1)))).mean(0))


class Flattened(TimeFirst):
    """Layers work on [b T, k]."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.fc(x.reshape(-1, 5))))
        return self.head(h.view(len(x), -1, 6).mean(1))


class OwnParameters(nn.Module):
    """A matrix, a scale for each channel and a normalisation, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))
        self.out = nn.Parameter(torch.randn(CLASSES, 6))
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight + self.shift)
        h = functional.layer_norm(h, (6,), self.shift.exp(), None)
        return functional.linear(h, functional.normalize(self.out, dim=1)) / self.temperature.exp()


class OwnNorm2d(nn.LayerNorm):
    """A LayerNorm of channels, as in ConvNeXt: a subclass with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class SameForward(nn.Linear):
    """A subclass with the parent's forward."""

    def __repr__(self) -> str:
        return "same"


class Conv1D(nn.Module):
    """The layer of this name in Hugging Face's GPT-2: a linear layer with weight [inputs, outputs].

    It stands in for the real class, whose name the rule looks up, where transformers is missing.
    """

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], len(self.bias))
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(shape)


Conv1D.__module__ = "transformers.pytorch_utils"


class Standardised(nn.Conv2d):
    """Weight standardisation: the weight of the convolution is computed from the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.layer_norm(self.weight, self.weight.shape[1:])
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = nn.Bilinear(5, 5, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.both(x, x.flip(1))))


class WindowBias(nn.Module):
    """Windows of one record are rows of their own, with a gathered bias table, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(5, 3), nn.Linear(3, CLASSES)
        self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("index", torch.tensor([0, 1, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:  # [b, 8, 5]
        windows = torch.tanh(self.fc(x.view(-1, 4, 5)))
        windows = windows * self.table[self.index].unsqueeze(0)
        return self.head(windows.view(len(x), 8, 3).mean(1))


def image(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES))


def text(*layers: nn.Module, features: int = 5) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(features, CLASSES))


MODELS = {
    "lstm": (lambda: Recurrence(nn.LSTM, batch_first=True), (4, 5), 0),
    "lstm, two layers and directions": (
        lambda: Recurrence(nn.LSTM, num_layers=2, bidirectional=True), (4, 5), 0),
    "lstm with given states": (GivenStates, (4, 5), 0),
    "gru": (lambda: Recurrence(nn.GRU, batch_first=True), (4, 5), 0),
    "gru, two layers and directions, no bias": (
        lambda: Recurrence(nn.GRU, num_layers=2, bidirectional=True, bias=False), (4, 5), 0),
    "rnn": (lambda: Recurrence(nn.RNN, num_layers=2), (4, 5), 0),
    "rnn with relu": (lambda: Recurrence(nn.RNN, nonlinearity="relu"), (4, 5), 0),
    "lstm cell": (lambda: Steps(nn.LSTMCell), (3, 5), 0),
    "gru cell": (lambda: Steps(nn.GRUCell), (3, 5), 0),
    "gru cell without bias": (lambda: Steps(nn.GRUCell, bias=False), (3, 5), 0),
    "rnn cell": (lambda: Steps(nn.RNNCell), (3, 5), 0),
    "rnn cell with relu": (lambda: Steps(nn.RNNCell, nonlinearity="relu"), (3, 5), 0),
    "encoder": (Encoder, (6,), 11),
    "encoder, time first": (lambda: Encoder(batch_first=False), (6,), 11),
    "encoder with masks": (lambda: Encoder(masked=True), (6,), 11),
    "cross-attention": (lambda: Encoder(cross=True), (6,), 11),
    "cross-attention, time first": (lambda: Encoder(False, cross=True), (6,), 11),
    "positions": (lambda: Positions(batch=False), (6,), 11),
    "positions of batch 1": (lambda: Positions(batch=True), (6,), 11),
    "time first": (TimeFirst, (3, 5), 0),
    "flattened": (Flattened, (3, 5), 0),
    "own parameters": (OwnParameters, (5,), 0),
    "own norm": (lambda: image(nn.Conv2d(2, 3, 3), OwnNorm2d(3), nn.Tanh(), features=27),
                 (2, 5, 5), 0),
    "same forward": (lambda: nn.Sequential(SameForward(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
                     (5,), 0),
    "standardised weights": (lambda: image(Standardised(2, 3, 3), nn.Tanh(), features=27),
                             (2, 5, 5), 0),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
                    nn.Tanh(), nn.Linear(6, CLASSES)), (5,), 0),
    "conv1d of hugging face": (lambda: nn.Sequential(
        Conv1D(6, 5), nn.Tanh(), Conv1D(6, 6), nn.Flatten(), nn.Linear(18, CLASSES)), (3, 5), 0),
    "bilinear": (Bilinear, (5,), 0),
    "windows": (WindowBias, (8, 5), 0),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), (5,), 0),
    "conv3d": (lambda: image(
        nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=1, groups=2), nn.Tanh(),
        nn.Conv3d(4, 3, (1, 2, 2), dilation=(1, 1, 2), bias=False), features=90), (2, 4, 4, 4), 0),
    "conv3d circular": (lambda: image(
        nn.Conv3d(1, 2, 3, padding=1, padding_mode="circular"), features=54), (1, 3, 3, 3), 0),
    "transposed conv 1d": (lambda: image(
        nn.ConvTranspose1d(2, 4, 3, stride=2), nn.Tanh(), features=36), (2, 4), 0),
    "transposed conv 2d": (lambda: image(
        nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(),
        nn.ConvTranspose2d(4, 3, 2, dilation=2), features=192), (2, 3, 3), 0),
    "transposed conv 3d": (lambda: image(
        nn.ConvTranspose3d(2, 3, 2, stride=2, bias=False), features=192), (2, 2, 2, 2), 0),
    "bag of mean": (lambda: text(nn.EmbeddingBag(11, 5, padding_idx=2)), (6,), 11),
    "bag of sum": (lambda: text(nn.EmbeddingBag(11, 5, mode="sum")), (6,), 11),
    "bag of maximum": (lambda: text(nn.EmbeddingBag(11, 5, mode="max")), (6,), 11),
    "rms norm": (lambda: nn.Sequential(
        nn.Linear(5, 6), nn.RMSNorm(6), nn.Flatten(), nn.Linear(18, CLASSES)), (3, 5), 0),
}  # fmt: skip
"""Name -> (model, shape of a record, vocabulary)."""
