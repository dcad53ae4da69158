"""Intake as it would be without groups: one INSERT and one call to Redis per request. For comparison only."""

import sys
from collections.abc import Callable
from typing import Any

from madeira.api import app
from madeira.store.database import Database


class OneByOne:
    """Has the face of a group commit, and commits each item by itself, in its caller's thread, on a pooled connection."""

    def __init__(self, *, database: Database, run: Callable[..., Any], after: Callable[..., Any] | None = None, **_: Any) -> None:
        self._database = database
        self._run = run
        self._after = after

    def start(self) -> None:
        """Nothing to start."""

    def stop(self, timeout_s: float) -> None:
        """Nothing to stop."""

    def submit(self, item: Any, timeout_s: float | None) -> Any:
        """Commit one item."""
        with self._database.connection() as conn:
            answers = self._run(conn, [item])
        if self._after is not None:
            self._after([item], answers)
        return answers[0]


_module = sys.modules["madeira.api.app"]
_module.GroupCommit = OneByOne  # type: ignore[attr-defined]
_module.POOL_MAX = 24  # type: ignore[attr-defined]

__all__ = ["app"]
