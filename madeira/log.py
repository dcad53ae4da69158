"""Structured logs: one JSON object a line (or a line for people), the same for our own lines and those of the libraries.

A line has a stable event key (`delivery.settled`), and whatever `bind` holds at that moment: the trace of an event is found
by its ``trace_id`` over all processes. Tracebacks carry no local variables and URLs no passwords, so that no secret leaves
by this door; what looks like one is hidden all the same.

A fault that repeats itself a thousand times a second must not fill the disk: of lines of one kind (logger, level, event key, and
the endpoint, source or queue that they name) so many are written in ten seconds, then it is only said how many were left out.
The level can be changed while the process runs: `set_level`.
"""

import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import structlog

from madeira.settings import Settings

#: Loggers of libraries that speak at every call, and would tell addresses with their queries.
_QUIET: Final = ("httpx", "httpcore", "psycopg", "psycopg.pool", "asyncio", "urllib3")

#: Loggers that libraries have given handlers of their own, or may give.
_TAKEN_OVER: Final = ("dramatiq", "periodiq", "gunicorn", "gunicorn.error", "gunicorn.access", "apscheduler")

#: Names of values that are never written, wherever they stand.
_SECRET_NAME: Final = re.compile(r"(?i)(^|[_-])(password|passwd|secret|secrets|authorization|cookie|api[_-]?key|secret[_-]key)$")

#: What is a secret by its looks: a bearer token, a signing secret.
_SECRET: Final = re.compile(r"(?i)\b(bearer\s+)[a-z0-9._~+/=-]{8,}|\b(whsec_)[a-z0-9+/=]{8,}")

#: Seconds in which lines of one kind are counted.
WINDOW_S: Final = 10.0

#: Kinds of lines that are counted at once; beyond, all windows are closed.
_KINDS: Final = 1_000

#: What tells two kinds apart beside logger, level and event key: the first of these that a line has.
_NAMES: Final = ("endpoint", "source", "queue")

_PASSWORD: Final = re.compile(r"(://[^\s:/@]*):[^\s@/]+@")

#: What moves a cursor, colours, or turns the direction of what follows: control characters (C0, DEL, C1), marks of direction, and
#: what ends a line to some. Strangers choose paths and names, and a terminal obeys whatever it is shown.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

#: What the text of several lines stands in; it keeps line breaks and tabs.
_TRACEBACKS: Final = frozenset({"exception", "stack"})

_Line = MutableMapping[str, Any]

#: Logger, level, event key, and whom it is about.
_Kind = tuple[str, int, str, str | None]


@dataclass(slots=True)
class _Window:
    """Lines of one kind in a stretch of time."""

    began: float
    seen: int = 0
    left_out: int = 0


class Sampler:
    """Decides which lines are left out: of each kind the first `burst` of a window are written; 0: all.

    `clock` tells seconds.
    """

    def __init__(self, *, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._clock = clock
        self._windows: dict[_Kind, _Window] = {}

    def lets(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if not self._burst:
            return True
        kind = _kind(record)
        window = self._windows.setdefault(kind, _Window(self._clock()))
        window.seen += 1
        window.left_out += window.seen > self._burst
        return window.seen <= self._burst

    def over(self, *, all_of_them: bool = False) -> list[logging.LogRecord]:
        """Close the windows that are over; a line for each in which something was left out."""
        now = self._clock()
        every = all_of_them or len(self._windows) > _KINDS
        closed = [kind for kind, window in self._windows.items() if every or now - window.began >= WINDOW_S]
        windows = [(kind, self._windows.pop(kind)) for kind in closed]
        return [_left_out(kind, window, now) for kind, window in windows if window.left_out]


def _kind(record: logging.LogRecord) -> _Kind:
    if not isinstance(record.msg, dict):
        return record.name, record.levelno, str(record.msg)[:200], None
    about = next((str(record.msg[name]) for name in _NAMES if name in record.msg), None)
    return record.name, record.levelno, str(record.msg.get("event")), about


def _left_out(kind: _Kind, window: _Window, now: float) -> logging.LogRecord:
    name, level, event, about = kind
    told = {"of": event, "count": window.left_out, "about": about, "seconds": round(now - window.began, 1)}
    values = {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": "log.left_out"}
    return logging.makeLogRecord(values | {key: value for key, value in told.items() if value is not None})


class _Handler(logging.StreamHandler[Any]):
    """Writes to standard error what the sampler lets."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sys.stderr)
        self._sampler = sampler

    def emit(self, record: logging.LogRecord) -> None:
        self.tell()
        if self._sampler.lets(record):
            super().emit(record)

    def tell(self, *, all_of_it: bool = False) -> None:
        """Say what was left out in windows that are over."""
        with self.lock or threading.RLock():
            for line in self._sampler.over(all_of_them=all_of_it):
                super().emit(line)

    def close(self) -> None:
        """Say the rest; the end of the process comes here."""
        self.tell(all_of_it=True)
        super().close()


#: The level that the environment asks for.
_own_level = "info"


def configure(settings: Settings, process: str) -> None:
    """Send all logging of this process to standard error, in the form that the settings ask for.

    `process` says on every line which kind of process speaks (``api``, ``worker``, ``scheduler`` …).
    """
    global _own_level
    handler = _Handler(Sampler(burst=settings.log_burst))
    handler.setFormatter(_formatter(settings, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    _own_level = settings.log_level
    set_level(None)
    for name in _TAKEN_OVER:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def set_level(level: str | None) -> bool:
    """Log from `level` on; None: what the environment asks for. Whether that is another one than before.

    Where `configure` was not called, it does nothing.
    """
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, _Handler)]
    if not ours:
        return False
    number = logging.getLevelNamesMapping()[(level or _own_level).upper()]
    changed = root.level != number
    root.setLevel(number)
    for handler in ours:
        # The loggers of some libraries have a level of their own, which root's does not hold back.
        handler.setLevel(number)
    return changed


def tell_left_out() -> None:
    """Say what was left out of what is over. Called now and then, so that it is said also when nothing follows."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.tell()


def write_to_own_stderr() -> None:
    """Write to the standard error that this process was started with, whatever has stood for it since."""
    own = sys.__stderr__
    if own is None:
        return
    sys.stdout = sys.stderr = own
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.setStream(own)


def catch() -> None:
    """Have what nobody catches, and Python's warnings, go the way of all lines: for processes that run for long."""
    logging.captureWarnings(capture=True)
    warnings.simplefilter("default")
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    get("madeira").critical("process.failed", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread else None
        get("madeira").critical("thread.failed", thread=name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))


def get(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: ``log.info("delivery.settled", status="dead")``."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextmanager
def bind(**values: Any) -> Iterator[None]:
    """Put `values` on every line logged inside, by whomever; those that are None are left out."""
    with structlog.contextvars.bound_contextvars(**{k: v for k, v in values.items() if v is not None}):
        yield


def _hide_secrets(_logger: Any, _method: str, line: _Line) -> _Line:
    for key, value in line.items():
        line[key] = _hidden(key, value)
    return line


def _hidden(key: Any, value: Any) -> Any:
    if value and isinstance(key, str) and _SECRET_NAME.search(key):
        return "***"
    if isinstance(value, str):
        text = _PASSWORD.sub(r"\1:***@", value) if "://" in value else value
        return _SECRET.sub(lambda m: f"{m[1] or m[2]}***", text)
    if isinstance(value, dict):
        return {k: _hidden(k, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(None, v) for v in value]
    return value


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
            _hide_secrets,
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
