"""What a client is told of a request that no application saw: a problem document, like every other refusal."""

import socket
from http import HTTPStatus
from typing import Any, Final

from gunicorn import util  # type: ignore[import-untyped]
from gunicorn.http import errors  # type: ignore[import-untyped]

from madeira import log
from madeira.api import problems

#: Since when a request names the host that it is for.
_NAMES_ITS_HOST: Final = (1, 1)


class NoHost(errors.ParseException):  # type: ignore[misc]
    """A request that does not name the host that it is for; RFC 9112, section 3.2, has it refused."""


_REFUSALS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (errors.LimitRequestLine, 414, "the request line is too long"),
    (errors.LimitRequestHeaders, 431, "the headers are too many or too long"),
    (errors.ExpectationFailed, 417, "only Expect: 100-continue is supported"),
    (errors.UnsupportedTransferCoding, 501, "Transfer-Encoding may be chunked only"),
    (errors.InvalidHeaderName, 400, "the name of a header is not valid"),
    (errors.InvalidHeader, 400, "a header is repeated, contradictory, or holds what it may not"),
    (errors.ObsoleteFolding, 400, "a header is folded over several lines"),
    (NoHost, 400, "the header Host is missing"),
    (errors.ParseException, 400, "the request is malformed"),
)

#: What is told of an error that is Madeira's own.
FAILED: Final = "an error inside Madeira; it is in the log"

_log: Final = log.get(__name__)


def refuse(client: socket.socket, error: Exception) -> None:
    """Tell a client why its request was not served, as the last answer of its connection."""
    for kind, status, detail in _REFUSALS:
        if isinstance(error, kind):
            _log.info("http.refused", status=status, reason=type(error).__name__)
            answer(client, status, detail)
            return
    _log.error("http.failed", exc_info=error)
    answer(client, 500, FAILED)


def require_host(req: Any) -> None:
    """Let pass a request that names the host that it is for.

    Raises:
        NoHost: it does not.
    """
    if req.version >= _NAMES_ITS_HOST and not any(name == "HOST" for name, _ in req.headers):
        raise NoHost


def answer(client: socket.socket, status: int, detail: str) -> None:
    """Tell a client `status` and `detail`, as the last answer of its connection, without waiting for it."""
    body = problems.parts(status, detail)
    head = (
        f"HTTP/1.1 {status} {problems.title(status)}\r\nConnection: close\r\n"
        f"Content-Type: {problems.MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n"
    )
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        head += f"Retry-After: {problems.RETRY_AFTER_S}\r\n"
    try:
        util.write_nonblock(client, f"{head}\r\n".encode("latin-1") + body)
    except OSError:
        _log.debug("http.client_gone")
