"""Small models of every kind that a site may train, for tests of hostile parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from noisewise.training.models import make_model
from noisewise.training.synthetic_records import RecordForm

IMAGE = RecordForm.single((1, 12, 12), torch.float32, (), torch.int64)
VECTOR = RecordForm.single((13,), torch.float32, (), torch.int64)
TOKENS = RecordForm.single((6,), torch.int64, (), torch.int64)
SEQUENCE = RecordForm.single((6, 16), torch.float32, (), torch.int64)


class Residual(nn.Module):
    """Two convolutions with a shortcut around them, and GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention from linear layers, with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        x = self.norm(x + torch.softmax(scores, -1) @ self.value(x))
        x = x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
        return self.head(x.mean(1))


class Words(nn.Module):
    """An embedding, a hidden layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.hidden, self.head = nn.Linear(48, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.table(x).flatten(1))))


class Adapter(nn.Module):
    """A frozen layer plus a trainable low-rank layer (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(13, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(13, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.frozen(x) + self.up(self.down(x))))


class Tied(nn.Module):
    """One layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(13, 13), nn.Linear(13, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(torch.relu(self.hidden(x)))))


class Recurrent(nn.Module):
    """A recurrent layer, read at its last step."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.cells, self.head = kind(16, 9, batch_first=True), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class OwnLstmCell(nn.LSTMCell):
    """A cell with a `forward` of its own, so without a rule."""

    def forward(self, x: Tensor, state: object = None) -> tuple[Tensor, Tensor]:
        return super().forward(x, state)


class OwnGruCell(nn.GRUCell):
    """A cell with a `forward` of its own, so without a rule."""

    def forward(self, x: Tensor, state: object = None) -> Tensor:
        return super().forward(x, state)


class Steps(nn.Module):
    """A recurrent cell, called once for each step."""

    def __init__(self, kind: type[nn.RNNCellBase] = nn.LSTMCell) -> None:
        super().__init__()
        self.cell, self.head = kind(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in range(2):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Packed(Recurrent):
    """A GRU on packed sequences, which neither a layer rule nor `vmap` supports."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, :-1, 0] > 0.5).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.cells(packed)[1][0])


class Bag(nn.Module):
    """The mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 16, mode="mean"), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bag(x)))


class Crossed(nn.Module):
    """Attention of one half of a sequence to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x[:, :3], x[:, 3:]
        return self.head(self.norm(self.attention(first, second, second)[0]).mean(1))


class Encoder(nn.Module):
    """A position table, a class token, an encoder layer and a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.token = nn.Embedding(50, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(7, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.scale, self.head = nn.Parameter(torch.randn(16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.table(x)], 1) + self.positions
        return self.head((self.layer(x) * self.scale)[:, 0])


MODELS: dict[str, tuple[Callable[[], nn.Module], RecordForm]] = {
    "softmax": (lambda: make_model("softmax", (1, 12, 12), 4, seed=0), IMAGE),
    "mlp": (lambda: make_model("mlp", (1, 12, 12), 4, seed=0, hidden=[32, 32]), IMAGE),
    "cnn": (lambda: make_model("cnn", (1, 12, 12), 4, seed=0), IMAGE),
    "narrow": (lambda: nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 4)), VECTOR),
    "sigmoid": (lambda: nn.Sequential(nn.Linear(13, 7), nn.SiLU(), nn.Linear(7, 4)), VECTOR),
    "residual": (Residual, IMAGE),
    "attention": (Attention, SEQUENCE),
    "words": (Words, TOKENS),
    "adapter": (Adapter, VECTOR),
    "tied": (Tied, VECTOR),
    "gru": (Recurrent, SEQUENCE),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCE),
    "rnn": (lambda: Recurrent(nn.RNN), SEQUENCE),
    "lstm cell": (Steps, SEQUENCE),
    "gru cell": (lambda: Steps(nn.GRUCell), SEQUENCE),
    "own lstm cell": (lambda: Steps(OwnLstmCell), SEQUENCE),
    "own gru cell": (lambda: Steps(OwnGruCell), SEQUENCE),
    "bag": (Bag, TOKENS),
    "cross-attention": (Crossed, SEQUENCE),
    "volume": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 1)),
            nn.Conv3d(1, 4, (1, 3, 3)),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(400, 4),
        ),
        IMAGE,
    ),
    "encoder": (Encoder, TOKENS),
    "up": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(1, 4, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 4)
        ),
        IMAGE,
    ),
    "volume after another layer": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 1)),
            nn.Conv3d(1, 4, (1, 3, 3), (1, 2, 2)),
            nn.ReLU(),
            nn.Conv3d(4, 4, (1, 3, 3)),
            nn.Flatten(),
            nn.Linear(36, 4),
        ),
        IMAGE,
    ),
    "down and up": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, 2, 1),
            nn.ConvTranspose2d(3, 3, 2, 2),
            nn.Flatten(),
            nn.Linear(432, 4),
        ),
        IMAGE,
    ),
    "no rule": (lambda: nn.Sequential(nn.Linear(13, 8), nn.PReLU(), nn.Linear(8, 4)), VECTOR),
}


def made(name: str) -> tuple[nn.Module, RecordForm]:
    """Return a model with fixed initial parameters, and the form of its records."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, form = MODELS[name]
        return make(), form
