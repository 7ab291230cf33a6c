"""An aggregator that fails on purpose."""

from __future__ import annotations

from noisewise.aggregation import Aggregation, Disclosure, ServerView, State


class Failing:
    needs: frozenset[Disclosure] = frozenset()

    def aggregate(self, view: ServerView, state: State) -> Aggregation:
        raise RuntimeError("on purpose")
