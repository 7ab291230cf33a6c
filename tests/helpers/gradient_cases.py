"""Models for the tests of per-record gradients, and the loop that gives the expected gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import layer_cases
import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.training.parameters import ParameterLayout

CLASSES = 4


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0  # vocabulary size for models that read tokens

    def records(self, n: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(0, CLASSES, (n,), generator=generator)
        if self.tokens:
            return torch.randint(0, self.tokens, (n, *self.shape), generator=generator), targets
        return torch.randn(n, *self.shape, generator=generator, dtype=dtype), targets

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model()
            for parameter in model.parameters():  # affine parameters of norms start at 1 and 0
                if parameter.dim() == 1:
                    nn.init.normal_(parameter, 0.5, 0.5)
        return model


def theta_of(model: nn.Module, dtype: torch.dtype) -> Tensor:
    return ParameterLayout.of(model).flatten(model).to(dtype)


def single_gradients(
    model: nn.Module, theta: Tensor, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]
) -> Tensor:
    """Return gradients [b, p] in float64, from one ordinary backward pass for each record."""
    model = copy.deepcopy(model).to(theta.dtype)
    layout = ParameterLayout.of(model)
    layout.load(model, theta)
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        loss(model(x[None]), y[None]).backward()
        parameters = dict(model.named_parameters())
        rows.append(
            torch.cat(
                [
                    torch.zeros(parameters[n].numel(), dtype=torch.float64)
                    if parameters[n].grad is None
                    else parameters[n].grad.double().flatten()
                    for n in layout.names
                ]
            )
        )
    return torch.stack(rows)


def clipped(gradients: Tensor, clip_norm: float | None) -> Tensor:
    """Return the sum of the clipped rows, written as in the paper."""
    total = torch.zeros(gradients.shape[1], dtype=torch.float64)
    for gradient in gradients:
        norm = float(gradient.norm())
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / norm) if norm > 0 else 1.0
        total += scale * gradient
    return total


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Nested(nn.Module):
    """Layers in a ModuleDict in a ModuleList, with functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6, bias=False)})
            for _ in range(2)
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part["a"](x)) * torch.sigmoid(part["b"](x))
        return self.head(x)


class Attention(nn.Module):
    """A small transformer block from Linear, LayerNorm and Embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class TwiceUsed(nn.Module):
    """One layer called three times, once on another number of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [b, 3, 5]
        once = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        return self.head(once.mean(1) + self.shared(x[:, 0]))


class TiedConvolutions(nn.Module):
    """Two layers with the same weight but their own bias, at two image sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.two.weight = self.one.weight
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.one(x)), 2)
        return self.head(torch.tanh(self.two(x)).amax(dim=(2, 3)))


class TiedEmbedding(nn.Module):
    """The table of an embedding is also the weight of a Linear, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.unembed.weight = self.embed.weight
        self.head = nn.Linear(9, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.unembed(self.embed(tokens))).mean(1))


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 5, padding_idx=3), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(1))


class InPlace(nn.Module):
    """In-place activations directly after a layer, and a layer whose output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle = nn.Conv2d(1, 3, 3), nn.Linear(3, 2)
        self.fc, self.head = nn.Linear(27, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu_()
        self.idle(x.mean(dim=(2, 3)))
        x = functional.relu(self.fc(x.flatten(1)), inplace=True)
        return self.head(x)


class InPlace1d(nn.Module):
    """In-place activations after Conv1d and norms; the first convolution has few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(1, 3, 3), nn.Conv1d(3, 4, 2, groups=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).relu_()).mul_(2.0)
        return self.head(self.norm(x).tanh_().mean(2).add_(1.0)).mul_(0.5)


class Views(nn.Module):
    """A model whose `view` works only in the default memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3 * 25, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).view(len(x), -1))


class Frozen(nn.Module):
    """Frozen layers, a frozen bias and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)
        self.conv, self.head = nn.Conv1d(1, 2, 3), nn.Linear(8, CLASSES)
        self.first.requires_grad_(False)
        self.second.bias.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(self.conv(x[:, None]).flatten(1))


def _image(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES))


def conv2d(name: str, size: int = 7, channels: int = 4, **options: object) -> Case:
    """A convolution with options (stride, padding, ...) between other layers."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 6, **options),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, CLASSES),
        )

    return Case(name, build, (2, size, size))


def conv1d(name: str, **options: object) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(4, 6, **options),
            nn.AdaptiveAvgPool1d(2),
            nn.Flatten(),
            nn.Linear(12, CLASSES),
        )

    return Case(name, build, (2, 11))


CASES = [
    Case("linear", lambda: nn.Linear(5, CLASSES), (5,)),
    Case("linear without bias", lambda: nn.Linear(5, CLASSES, bias=False), (5,)),
    Case("mlp", lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES)), (5,)),
    Case(
        "linear on short sequences",
        lambda: nn.Sequential(
            nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 9), nn.Flatten(), nn.Linear(18, CLASSES)
        ),
        (2, 20),
    ),
    Case(
        "linear on long sequences",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), _image(features=4 * 60)),
        (5, 12, 3),
    ),
    conv2d("conv 3x3", kernel_size=3),
    conv2d("conv 3x3 of few channels", channels=1, kernel_size=3),
    conv2d("conv 1x1", kernel_size=1),
    conv2d("conv of many channels", channels=24, kernel_size=3, padding=1),
    conv2d("conv stride", kernel_size=3, stride=2, padding=1),
    conv2d("conv stride of many channels", channels=24, kernel_size=3, stride=2, padding=1),
    conv2d("conv oblong", kernel_size=(3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)),
    conv2d("conv same", kernel_size=3, padding="same"),
    conv2d("conv same, even kernel", kernel_size=4, padding="same", dilation=(1, 2)),
    conv2d("conv valid", kernel_size=3, padding="valid"),
    conv2d("conv dilation", kernel_size=3, dilation=2, padding=2),
    conv2d("conv groups", kernel_size=3, groups=2),
    conv2d("conv groups, small images", size=3, kernel_size=3, groups=2, padding=1),
    conv2d("conv depthwise", channels=6, kernel_size=3, groups=6, padding=1),
    conv2d("conv without bias", kernel_size=3, bias=False),
    conv2d("conv reflect", kernel_size=3, padding=2, padding_mode="reflect"),
    conv2d("conv circular", kernel_size=3, padding=(1, 2), padding_mode="circular"),
    conv2d("conv replicate, same", kernel_size=4, padding="same", padding_mode="replicate"),
    conv2d("conv with dead taps", size=1, kernel_size=5, padding=2),
    conv2d("conv with dead taps, dilated", size=2, kernel_size=3, padding=4, dilation=4),
    conv2d("conv with dead taps on one side", size=2, kernel_size=3, padding=1, stride=3),
    conv2d("conv wide padding", size=2, kernel_size=3, padding=3),
    conv1d("conv1d", kernel_size=3),
    conv1d("conv1d stride", kernel_size=4, stride=3, padding=2),
    conv1d("conv1d groups, dilation", kernel_size=2, groups=2, dilation=3),
    conv1d("conv1d same", kernel_size=4, padding="same"),
    conv1d("conv1d circular", kernel_size=3, padding=2, padding_mode="circular"),
    Case(
        "group norm",
        lambda: _image(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), features=54),
        (2, 5, 5),
    ),
    Case(
        "group norm without positions",
        lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, CLASSES)),
        (5,),
    ),
    Case(
        "layer norm",
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), _image(features=18)),
        (3, 5),
    ),
    Case(
        "layer norm over two dimensions, and without bias",
        lambda: nn.Sequential(
            nn.LayerNorm((3, 5)), nn.Linear(5, 6), nn.LayerNorm(6, bias=False), _image(features=36)
        ),
        (2, 3, 5),
    ),
    Case(
        "instance norm 2d",
        lambda: _image(
            nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.ReLU(), features=27
        ),
        (2, 5, 5),
    ),
    Case(
        "instance norm 1d",
        lambda: _image(nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3, affine=True), features=18),
        (2, 8),
    ),
    Case(
        "instance norm 3d",
        lambda: _image(nn.InstanceNorm3d(2, affine=True), features=54),
        (2, 3, 3, 3),
    ),
    Case("residual", lambda: _image(nn.Conv2d(2, 4, 3), Residual(4), features=36), (2, 5, 5)),
    Case("nested", Nested, (6,)),
    Case("embedding and linear", TextClassifier, (7,), tokens=13),
    Case(
        "embedding of one token",
        lambda: nn.Sequential(nn.Embedding(13, 5), nn.Linear(5, CLASSES)),
        (),
        tokens=13,
    ),
    Case("transformer block", Attention, (6,), tokens=11),
    Case("shared layer", TwiceUsed, (3, 5)),
    Case("tied convolutions", TiedConvolutions, (2, 6, 6)),
    Case("tied embedding", TiedEmbedding, (4,), tokens=9),
    Case("in place", InPlace, (1, 5, 5)),
    Case("in place, 1d", InPlace1d, (1, 9)),
    Case("views", Views, (2, 5, 5)),
    Case("frozen", Frozen, (5,)),
    Case(
        "pool behind relu",
        lambda: _image(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            features=16,
        ),
        (1, 6, 6),
    ),
    *(
        Case(f"{kind.__name__} from zero", partial(layer_cases.Steps, kind, given=False), (3, 5))
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    ),
    *(Case(name, *options) for name, options in layer_cases.MODELS.items()),
]
