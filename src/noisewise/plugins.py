"""Import a user's own model, loss, aggregator or estimator that a config names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from noisewise.errors import InvalidValueError

__all__ = ["OR_OWN", "load_object"]

OR_OWN = ', or "package.module:name"'
"""For errors about a name that may also be that of a user's own object."""


def load_object(spec: str, field: str = "name") -> object:
    """Import the object ``"package.module:name"``, also from the current folder.

    Installed modules and the standard library take precedence: a ``random.py`` in the current
    folder does not replace Python's ``random``. If no installed module has the name, the current
    folder is appended to ``sys.path`` and stays there, because the module's own imports and worker
    processes need it.

    Args:
        spec: module and attribute, separated by a colon.
        field: name of the config key, for the error.

    Returns:
        The object.

    Raises:
        InvalidValueError: the module or the attribute does not exist or cannot be imported.

    Example:
        >>> load_object("math:sqrt")(9.0)
        3.0
    """
    form = 'must be "package.module:name" of an object that can be imported'
    module_name, _, attribute = spec.partition(":")
    parts = module_name.split("."), attribute.split(".")
    if not all(part.isidentifier() for names in parts for part in names):
        raise InvalidValueError(field, spec, form)
    package = parts[0][0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        _append_current_folder()
    try:
        result: object = importlib.import_module(module_name)
        for part in parts[1]:
            result = getattr(result, part)
    except (ImportError, AttributeError) as error:
        reason = f"{error}{_hidden_file_hint(package)}"
        raise InvalidValueError(field, spec, f"{form} ({reason})") from error
    return result


def _append_current_folder() -> None:
    """Make the modules of the current folder importable, after all other modules."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # the file may be new


def _hidden_file_hint(package: str) -> str:
    """Return a hint if an installed module has the same name as a file of the current folder."""
    own_file = next(
        (path for path in (Path(f"{package}.py"), Path(package)) if path.exists()), None
    )
    module = sys.modules.get(package)
    origin = getattr(module, "__file__", None)
    if own_file is None or module is None or (origin and Path(origin).is_relative_to(Path.cwd())):
        return ""
    hiding = origin or "a built-in module"
    return f"; {own_file} of the current folder is hidden by {hiding}: rename it"
