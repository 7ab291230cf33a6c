"""`Declaration`: what a site claims about its budget. It is not signed; no server can check it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from noisewise.data.specs import UNITS
from noisewise.errors import InvalidValueError
from noisewise.storage import write_atomic

__all__ = ["Declaration", "load_declarations", "read_declaration", "save_declarations"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Declaration:
    """A site's claim about its budget.

    Attributes:
        unit: what the budget protects, one of `UNITS`.
        epsilon: of the site's whole budget, over all rounds and federations.
        delta: of the budget.
    """

    unit: str
    epsilon: float
    delta: float


def read_declaration(fields: Mapping[str, object]) -> Declaration:
    """Check the fields of a declaration that a site sent or that was stored.

    Args:
        fields: must be exactly ``unit``, ``epsilon`` and ``delta``.

    Raises:
        InvalidValueError: a field is missing, unknown, of another type or out of range. The message
            is one line of bounded length.
    """
    if len(fields) != 3 or set(fields) != {"unit", "epsilon", "delta"}:
        names = [str(name)[:20] for name in list(fields)[:5]]
        raise InvalidValueError("declaration", names, "must be exactly unit, epsilon and delta")
    unit = fields["unit"]
    if type(unit) is not str or unit not in UNITS:
        raise InvalidValueError(
            "declaration.unit", str(unit)[:20], f"must be one of {', '.join(UNITS)}"
        )
    return Declaration(unit, _number(fields, "epsilon", math.inf), _number(fields, "delta", 1.0))


def _number(fields: Mapping[str, object], name: str, below: float) -> float:
    value = fields[name]
    if type(value) is not float or not 0 < value < below:
        allowed = f"must be a number above 0 and below {below:g}"
        raise InvalidValueError(f"declaration.{name}", str(value)[:40], allowed)
    return value


def load_declarations(file: Path) -> dict[str, Declaration]:
    """Read declarations by client id; an empty dict if the file is missing or damaged."""
    try:
        content = json.loads(file.read_text())
        return {str(client): read_declaration(fields) for client, fields in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        _log.warning("%s is damaged (%s); the server asks the sites again", file, error)
        return {}


def save_declarations(file: Path, declarations: Mapping[str, Declaration]) -> None:
    """Write declarations by client id, atomically."""
    content = {client: asdict(declared) for client, declared in declarations.items()}
    write_atomic(file, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
