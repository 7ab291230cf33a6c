"""Small models of every kind that a site may train, for tests of hostile parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from noisewise.training.models import make_model
from noisewise.training.synthetic_records import RecordForm

IMAGE = RecordForm((1, 12, 12), torch.float32, (), torch.int64)
VECTOR = RecordForm((13,), torch.float32, (), torch.int64)
TOKENS = RecordForm((6,), torch.int64, (), torch.int64)
SEQUENCE = RecordForm((6, 16), torch.float32, (), torch.int64)


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
    """A GRU, which neither a layer rule nor `vmap` supports."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(16, 9, batch_first=True), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


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
    "no rule": (lambda: nn.Sequential(nn.Linear(13, 8), nn.PReLU(), nn.Linear(8, 4)), VECTOR),
}


def made(name: str) -> tuple[nn.Module, RecordForm]:
    """Return a model with fixed initial parameters, and the form of its records."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, form = MODELS[name]
        return make(), form
