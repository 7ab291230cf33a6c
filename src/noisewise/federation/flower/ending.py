"""How a server's run ends: finished, or with an error that names the causes.

Flower marks a run as failed if its ServerApp raises; there is no other way to tell it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from noisewise.errors import NoUpdatesError, UpdateError
from noisewise.federation.causes import causes_of, no_updates_text
from noisewise.federation.server_run import ServerRun

__all__ = ["closing_on_error", "end_run"]

_log = logging.getLogger(__name__)


@contextmanager
def closing_on_error(run: ServerRun) -> Iterator[None]:
    """Write the run's result before an `UpdateError` (too few clients connected) ends it."""
    try:
        yield
    except UpdateError as error:
        run.finish()
        if run.changed:
            raise
        raise NoUpdatesError(f"{error}; {no_updates_text(run.records)}") from error


def end_run(run: ServerRun, failed: int) -> None:
    """Write the run's result.

    Args:
        run: all rounds are played, or too many in a row failed.
        failed: how many rounds in a row left the model as it was, up to now.

    Raises:
        NoUpdatesError: no round changed the model.
        UpdateError: rounds are left; the same command resumes the run.
    """
    result = run.finish()
    if not run.changed:
        raise NoUpdatesError(no_updates_text(run.records))
    unchanged = len(result.rounds) - result.rounds_changed
    causes = "\n".join(
        f"- {cause.text()}" for cause in causes_of(run.records[len(run.records) - failed :])
    )
    if not run.ended:
        raise UpdateError(
            f"{failed} rounds in a row left the model as it was, after {result.rounds_changed} "
            f"that changed it; run the same command again to resume\n{causes}"
        )
    if unchanged:
        _log.warning("%d of %d rounds left the model as it was", unchanged, len(result.rounds))
