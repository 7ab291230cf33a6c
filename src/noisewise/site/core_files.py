"""The files of the trusted core, and one hash of all of them.

The core is everything that the modules of `noisewise.site` import from this package, directly or
through other files. docs/trusted_core.md lists the files.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from noisewise import __version__

__all__ = [
    "PACKAGE",
    "core_files",
    "core_hash",
    "import_closure",
    "imported_modules",
    "running_software",
]

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the installed package."""


def core_files() -> tuple[Path, ...]:
    """The source files of the trusted core, in the order of their paths."""
    return tuple(sorted(import_closure(PACKAGE.joinpath("site").rglob("*.py"))))


def core_hash() -> str:
    """SHA-256 of the paths and contents of all files of the core, as they are installed here.

    It identifies a version of the software: the same files have the same hash on every machine. It
    does not prove that these files ran, since changed software can print any hash.
    """
    digest = hashlib.sha256(b"noisewise-core-1")
    for file in core_files():
        for part in (file.relative_to(PACKAGE).as_posix().encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


@cache
def running_software() -> str:
    """Version and hash of the core, as entries of a ledger name the software that makes them.

    The files are read once, at the first call: a vault calls this at its start, when it imports
    them.
    """
    return f"noisewise {__version__} core {core_hash()}"


def import_closure(roots: Iterable[Path]) -> set[Path]:
    """The files, and all of ours that importing them runs: those of parent packages too.

    Args:
        roots: files of this package.
    """
    waiting, visited = list(roots), set()
    while waiting:
        path = waiting.pop()
        if path in visited:
            continue
        visited.add(path)
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == PACKAGE.name:
                files = [_file_of(parts[1:k]) for k in range(1, len(parts) + 1)]
                waiting += [file for file in files if file is not None]
    return visited


def imported_modules(path: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in it except under ``if TYPE_CHECKING``.

    Raises:
        ValueError: the file has a relative import.
    """
    waiting: list[ast.AST] = [ast.parse(path.read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: relative import")
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:  # expressions have no imports
            blocks = (ast.stmt, ast.ExceptHandler, ast.match_case)
            waiting += [one for one in ast.iter_child_nodes(node) if isinstance(one, blocks)]


def _file_of(parts: list[str]) -> Path | None:
    """The file of one of our modules; None for a name inside of a module."""
    path = PACKAGE.joinpath(*parts)
    files = (path / "__init__.py", path.with_name(path.name + ".py"))
    return next((file for file in files if file.is_file()), None)
