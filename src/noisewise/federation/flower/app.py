"""`write_app`: a ready Flower app in a new folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from noisewise.errors import InvalidValueError
from noisewise.storage import write_atomic

__all__ = ["write_app"]

_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "server_app.py.txt": "noisewise_app/server_app.py",
    "client_app.py.txt": "noisewise_app/client_app.py",
    "site.toml.txt": "site.toml",
    "demo.py.txt": "demo.py",
    "certificates.sh.txt": "certificates.sh",
}
_GITIGNORE = "demo/\nsimulated/\nkeys/\nflwr/\nruns/\nstate.db*\n*.ledger*\n*.npz\n"


def write_app(folder: Path) -> tuple[Path, ...]:
    """Write the app's files; needs no Flower.

    Raises:
        InvalidValueError: the folder has something in it already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidValueError("DIR", str(folder), "must be a new or empty folder")
    source = resources.files("noisewise.federation.flower") / "template"
    written = []
    for name, target in _FILES.items():
        content = (source / name).read_bytes()
        write_atomic(folder / target, content)
        written.append(folder / target)
    write_atomic(folder / "noisewise_app" / "__init__.py", b'"""The Flower app."""\n')
    write_atomic(folder / ".gitignore", _GITIGNORE.encode())
    return (*written, folder / "noisewise_app" / "__init__.py", folder / ".gitignore")
