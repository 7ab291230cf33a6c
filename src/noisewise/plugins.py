"""Objects by name: how a config points at a user's own model, loss, aggregator or estimator."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from noisewise.errors import InvalidValueError

__all__ = ["load_object"]


def load_object(spec: str, field: str = "name") -> object:
    """Import ``"package.module:name"``, also from the current folder.

    Installed modules and those of the standard library come first: a ``random.py`` in the current
    folder replaces neither. The current folder joins the end of ``sys.path`` when a module is found
    nowhere else, and stays there for the module's own imports and for worker processes.

    Args:
        spec: module and attribute, separated by a colon.
        field: what to call it in an error.

    Raises:
        InvalidValueError: if there is no such module or attribute.

    Example:
        >>> load_object("math:sqrt")(9.0)
        3.0
    """
    form = 'must be "package.module:name" of something that can be imported'
    module_name, _, attribute = spec.partition(":")
    parts = module_name.split("."), attribute.split(".")
    if not all(part.isidentifier() for names in parts for part in names):
        raise InvalidValueError(field, spec, form)
    package = parts[0][0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        _append_current_folder()
    try:
        found: object = importlib.import_module(module_name)
        for part in parts[1]:
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        reason = f"{error}{_hidden(package)}"
        raise InvalidValueError(field, spec, f"{form} ({reason})") from error
    return found


def _append_current_folder() -> None:
    """Let modules of the current folder be imported, after all others."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # a file may have been written a moment ago


def _hidden(package: str) -> str:
    """What to say if an installed module has the name of the user's own in the current folder."""
    own = next((path for path in (Path(f"{package}.py"), Path(package)) if path.exists()), None)
    module = sys.modules.get(package)
    origin = getattr(module, "__file__", None)
    if own is None or module is None or (origin and Path(origin).is_relative_to(Path.cwd())):
        return ""
    return f"; {own} of the current folder is hidden by {origin or 'a built-in module'}: rename it"
