"""gunicorn's log in the form of all our logs."""

import logging
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from gunicorn import glogging  # type: ignore[import-untyped]

from madeira import log
from madeira.api import app

#: Seconds after which an answer is worth a line of its own.
SLOW_S: Final = 1.0

_log: Final = log.get(__name__)


class Logger(glogging.Logger):  # type: ignore[misc]
    """gunicorn's logger, whose lines go the way of all our lines.

    An answer gets a line when it is an error or was slow; at level ``debug`` every one does. What was accepted is on record
    in Postgres.
    """

    def setup(self, cfg: Any) -> None:
        """Take the place of gunicorn's own handlers and formats."""
        self.cfg = cfg
        s = app.settings
        log.configure(s, "api")
        log.catch()
        self.loglevel = getattr(logging, s.log_level.upper())
        self.error_log.setLevel(self.loglevel)
        self.error_log.propagate = True
        self._every = self.loglevel <= logging.DEBUG

    @property
    def access_log_enabled(self) -> bool:
        """Whether `access` wants to be called."""
        return True

    def access(self, resp: Any, req: Any, environ: Any, request_time: timedelta) -> None:
        """Tell of one answer."""
        status = resp.status_code if hasattr(resp, "status_code") else _status(resp.status)
        slow = request_time.total_seconds() > SLOW_S
        if status < HTTPStatus.BAD_REQUEST and not slow and not self._every:
            return
        _log.log(
            logging.WARNING if slow or status >= HTTPStatus.INTERNAL_SERVER_ERROR else logging.INFO,
            "http.answered",
            method=environ.get("REQUEST_METHOD"),
            path=environ.get("PATH_INFO"),
            source=environ.get("HTTP_X_MADEIRA_SOURCE"),
            status=status,
            duration_s=request_time.total_seconds(),
            client=environ.get("REMOTE_ADDR"),
        )


def _status(line: Any) -> int:
    digits = str(line).split(None, 1)[0]
    return int(digits) if digits.isdigit() else 0
