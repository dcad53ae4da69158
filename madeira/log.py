"""Structured logs: one JSON object a line (or a line for people), the same for our own lines and those of the libraries.

A line has a stable event key (`delivery.settled`), and whatever `bind` holds at that moment: the trace of an event is found
by its ``trace_id`` over all processes. Tracebacks carry no local variables and URLs no passwords, so that no secret leaves
by this door.
"""

import logging
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import structlog

from madeira.settings import Settings

#: Loggers of libraries that speak at every call, and would tell addresses with their queries.
_QUIET: Final = ("httpx", "httpcore", "psycopg", "psycopg.pool", "asyncio", "urllib3")

#: Loggers that libraries have given handlers of their own, or may give.
_TAKEN_OVER: Final = ("dramatiq", "periodiq", "gunicorn", "gunicorn.error", "gunicorn.access", "apscheduler")

_PASSWORD: Final = re.compile(r"(://[^\s:/@]*):[^\s@/]+@")

#: What moves a cursor, colours, or turns the direction of what follows: control characters (C0, DEL, C1), marks of direction, and
#: what ends a line to some. Strangers choose paths and names, and a terminal obeys whatever it is shown.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

#: What the text of several lines stands in; it keeps line breaks and tabs.
_TRACEBACKS: Final = frozenset({"exception", "stack"})

_Line = MutableMapping[str, Any]


def configure(settings: Settings, process: str) -> None:
    """Send all logging of this process to standard error, in the form that the settings ask for.

    `process` says on every line which kind of process speaks (``api``, ``worker``, ``scheduler`` …).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(settings, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _TAKEN_OVER:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: ``log.info("delivery.settled", status="dead")``."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextmanager
def bind(**values: Any) -> Iterator[None]:
    """Put `values` on every line logged inside, by whomever; those that are None are left out."""
    with structlog.contextvars.bound_contextvars(**{k: v for k, v in values.items() if v is not None}):
        yield


def _hide_passwords(_logger: Any, _method: str, line: _Line) -> _Line:
    for key, value in line.items():
        if isinstance(value, str) and "://" in value:
            line[key] = _PASSWORD.sub(r"\1:***@", value)
    return line


def _hide_controls(_logger: Any, _method: str, line: _Line) -> _Line:
    """Write what a terminal would obey as its escape; JSON is for programs."""
    return {_UNSAFE.sub(_visible, key): _without_controls(key, value) for key, value in line.items()}


def _without_controls(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else repr(value)
    if key in _TRACEBACKS:
        return _UNSAFE.sub(lambda c: c[0] if c[0] in "\n\t" else _visible(c), text)
    return _UNSAFE.sub(_visible, text)


def _visible(character: re.Match[str]) -> str:
    return character[0].encode("unicode_escape").decode()


def _formatter(settings: Settings, process: str) -> logging.Formatter:
    def name_process(_logger: Any, _method: str, line: _Line) -> _Line:
        line["process"] = process
        return line

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_BEFORE,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            name_process,
            structlog.processors.format_exc_info,
            _hide_passwords,
            *_rendering(settings),
        ],
    )


def _rendering(settings: Settings) -> list[Any]:
    if settings.log_format == "json":
        return [structlog.processors.JSONRenderer(default=str, ensure_ascii=False)]
    to_text = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    return [_hide_controls, to_text]


#: What every line goes through, ours and the libraries' alike.
_BEFORE: Final[list[Any]] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]

# Done on import: a module that asks for its logger before `configure` ran must not get another kind of logger.
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
    logger_factory=structlog.stdlib.LoggerFactory(),
    cache_logger_on_first_use=True,
)
