"""How a server's run ends: finished, or with an error that names the causes.

A ServerApp has to raise an exception if Flower is to mark its run as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from noisewise.errors import NoUpdatesError, UpdateError
from noisewise.federation.missing_updates import causes_of, no_updates_text
from noisewise.federation.run_loop import RunLoop

__all__ = ["closing_on_error", "end_run"]

_log = logging.getLogger(__name__)


@contextmanager
def closing_on_error(run: RunLoop) -> Iterator[None]:
    """Write the run's result before an `UpdateError` (too few clients connected) ends the run.

    Raises:
        NoUpdatesError: in place of the `UpdateError`, if no round changed the model.
    """
    try:
        yield
    except UpdateError as error:
        run.finish()
        if run.changed:
            raise
        raise NoUpdatesError(f"{error}; {no_updates_text(run.records)}") from error


def end_run(run: RunLoop, failed: int) -> None:
    """Write the run's result.

    Args:
        run: it has ended, or too many rounds in a row failed.
        failed: number of last rounds in a row that did not change the model.

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
            f"{failed} rounds in a row did not change the model, after {result.rounds_changed} "
            f"that changed it; run the same command again to resume\n{causes}"
        )
    if unchanged:
        _log.warning("%d of %d rounds did not change the model", unchanged, len(result.rounds))
