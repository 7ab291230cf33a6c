"""Objects by name: how a config points at a user's own model, loss, aggregator or estimator."""

from __future__ import annotations

import importlib
import os
import sys

from noisewise.errors import InvalidValueError

__all__ = ["load_object"]


def load_object(spec: str, field: str = "name") -> object:
    """Import ``"package.module:name"``, also from the current folder.

    Args:
        spec: module and attribute, separated by a colon.
        field: what to call it in an error.

    Example:
        >>> load_object("math:sqrt")(9.0)
        3.0
    """
    form = 'must be "package.module:name" of something that can be imported'
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise InvalidValueError(field, spec, form)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a config names files in it
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidValueError(field, spec, f"{form} ({error})") from error
    return found
