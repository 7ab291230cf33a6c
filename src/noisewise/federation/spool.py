"""`Spool`: the updates of an open round, on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Spool"]


class Spool(Mapping[str, Tensor]):
    """Updates [p] by client id, each in a float32 file that is written when the update arrives.

    An update is read when it is asked for, and not kept. So the only copy in memory is the matrix
    that the aggregator reads (4 p n bytes), plus one reply at a time. Leaving the ``with`` block
    deletes the files.

    Args:
        folder: where the files go; by default the system's folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="updates-", dir=folder)
        self._files: dict[str, Path] = {}

    def add(self, client: str, update: Tensor) -> None:
        """Write the update [p] of a client."""
        path = Path(self._folder.name) / f"{len(self._files)}.f4"
        update.detach().numpy().tofile(path)
        self._files[client] = path

    def __getitem__(self, client: str) -> Tensor:
        return torch.from_numpy(np.fromfile(self._files[client], dtype=np.float32))

    def __contains__(self, client: object) -> bool:
        return client in self._files  # without reading the file

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *details: object) -> None:
        self._folder.cleanup()
