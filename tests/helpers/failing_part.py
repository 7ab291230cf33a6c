"""Aggregators that fail on purpose."""

from __future__ import annotations

import os
import signal

from noisewise.aggregation import Aggregation, Disclosure, ServerView, State


class Failing:
    """Raises an error in every round."""

    needs: frozenset[Disclosure] = frozenset()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        raise RuntimeError("on purpose")


class Killed(Failing):
    """Its process ends as if the system had run out of memory."""

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
