"""Templates of the HTML pages. Values are escaped and control characters are made visible."""

from __future__ import annotations

import jinja2
from markupsafe import Markup

from noisewise.text import printable

__all__ = ["template_environment"]


def template_environment() -> jinja2.Environment:
    """Return a jinja environment for the files in ``report/templates``.

    It escapes every value, makes control characters visible and rejects undefined names.
    """
    return jinja2.Environment(
        loader=jinja2.PackageLoader("noisewise.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable_value(value: object) -> object:
    """Return a value with control characters escaped."""
    if isinstance(value, Markup):
        return Markup(printable(value, lines=True))
    return printable(value, lines=True) if isinstance(value, str) else value
