"""What a site declares to servers that ask: three fields of its own file, if the site opted in."""

from __future__ import annotations

from noisewise.privacy.declaration import Declaration
from noisewise.site.site_file import Site

__all__ = ["site_declaration"]


def site_declaration(site: Site) -> Declaration | None:
    """The unit and budget of the site's file; None if the site has not opted in.

    Neither records nor ledger are read.
    """
    part = site.config.declaration
    if part is None or not part.publish:
        return None
    return Declaration(site.plan.unit, site.budget.epsilon, site.budget.delta)
