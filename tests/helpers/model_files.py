"""Read the parameters of a `model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def trained_vector(file: Path) -> Tensor:
    """[p] the trained parameters in the order of theta, also of an older file."""
    with safe_open(file, framework="pt") as opened:
        header = (opened.metadata() or {}).get("noisewise")
        names = ["theta"] if header is None else json.loads(header)["trained"]
        return torch.cat([opened.get_tensor(name).reshape(-1) for name in names])
