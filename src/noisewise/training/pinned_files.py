"""Files of public encoders, which are read only if they have the SHA-256 that the user gave."""

from __future__ import annotations

import hashlib
from pathlib import Path

from noisewise.errors import InvalidValueError
from noisewise.storage import cache_dir

__all__ = ["encoder_folder", "read_pinned"]


def encoder_folder() -> Path:
    """The folder of the cache into which ``noisewise encoders get`` puts files."""
    return cache_dir() / "encoders"


def read_pinned(path: str | Path, sha256: str | None, field: str, hash_field: str) -> bytes:
    """The content of a file whose SHA-256 was given.

    Args:
        path: of the file. A relative path that the current folder does not have is looked up in
            `encoder_folder`; ``~`` is the user's home.
        sha256: of the file.
        field: name of the field with the path, for errors.
        hash_field: name of the field with the SHA-256.

    Raises:
        InvalidValueError: the file cannot be read, or the SHA-256 is missing or is another one.
    """
    named_file = Path(path).expanduser()
    downloaded = encoder_folder() / named_file
    file = downloaded if not named_file.exists() and downloaded.exists() else named_file
    if sha256 is None:
        allowed = f"must be the SHA-256 of {file}; `sha256sum {file}` prints it"
        raise InvalidValueError(hash_field, None, allowed)
    try:
        content = file.read_bytes()
    except OSError as error:
        allowed = f"cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError) and not named_file.is_absolute():
            allowed = (
                f"is neither in the current folder nor in {encoder_folder()}; "
                "`noisewise encoders list` shows which encoders can be downloaded"
            )
        raise InvalidValueError(field, str(path), allowed) from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256.lower():
        raise InvalidValueError(hash_field, sha256, f"must be that of {file}, which is {actual}")
    return content
