"""`lazy_names`: public names of a package that are imported on first use.

Importing torch takes a second; ``import noisewise`` and ``noisewise --help`` do not wait for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        homes: for each public name, the module inside of the package that defines it, or
            ``"module:name"`` if it has another name there.

    Returns:
        A function that imports a name when it is first asked for.

    Raises:
        ValueError: a name is also that of its module, which Python would return instead.
    """
    if clash := [name for name, home in homes.items() if home.partition(":")[0] == name]:
        raise ValueError(f"{package}: {clash[0]} is the name of a module too")

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own_name = homes[name].partition(":")
        return getattr(importlib.import_module(f"{package}.{module}"), own_name or name)

    return get
