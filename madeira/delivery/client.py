"""The one HTTP client of a process: an `httpx.Client` over our own transport.

httpx carries the request and the response (so that its logging, its hooks and its types work as everywhere); sockets, pool,
deadline and bounds are the transport's. No redirects are followed, nothing comes from the environment (no proxies), no
cookies are kept: receivers are strangers to each other.
"""

import functools
import ssl
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import certifi
import httpx

from madeira import certificates
from madeira.delivery.answer import Answer, CallFailed
from madeira.delivery.connection import Deadline
from madeira.delivery.request import OutboundRequest
from madeira.delivery.resolve import Resolver
from madeira.delivery.transport import CERTIFICATE, DEADLINE, REPLY, TARGET, Pool, Transport
from madeira.egress import Egress
from madeira.records import ClientCertificate
from madeira.states import ErrorCode

#: TLS settings that are kept, one for each client certificate in use; each takes a megabyte and 40 ms to make.
MAX_CONTEXTS: Final = 64


class Caller:
    """Calls receivers; shared by all threads of a process. Made after a fork.

    `max_connections` is how many calls may be under way at once, and how many connections are kept between calls; at least
    the number of threads that call: one too many fails at once, as ``platform``. `egress` says where calls may go; what it
    refuses is not connected to. `ca_file` (PEM) is trusted besides the usual roots; certificates are always checked.

    Raises:
        OSError: the file cannot be read.
        ssl.SSLError: it does not hold what it should.
    """

    def __init__(
        self, *, max_connections: int, egress: Egress, ca_file: Path | None = None, resolver: Resolver | None = None
    ) -> None:
        self._ca_file = ca_file
        self._context_lock = threading.Lock()
        self._contexts = functools.lru_cache(maxsize=MAX_CONTEXTS)(self._make_context)
        if ca_file:
            self._contexts(None)
        self._pool = Pool(max_connections=max_connections, max_idle=max_connections)
        self._client = _Client(
            transport=Transport(pool=self._pool, resolver=resolver or Resolver(), egress=egress, context=self._context),
            trust_env=False,
            auth=httpx.Auth(),
        )

    def call(self, request: OutboundRequest, *, deadline_s: float) -> Answer:
        """Make one call, which ends at most `deadline_s` seconds from now.

        Raises:
            CallFailed: it brought no complete answer; nothing else is raised for whatever a receiver or the network does.
        """
        started_at, started = datetime.now(UTC), time.monotonic()
        try:
            response = self._client.send(_httpx_request(request, Deadline(deadline_s)), stream=True)
        except CallFailed as e:
            e.url, e.started_at, e.duration_s = request.url, started_at, time.monotonic() - started
            raise
        except Exception as e:
            failure = CallFailed(ErrorCode.PLATFORM, f"the call could not be made: {type(e).__name__}")
            failure.url, failure.started_at, failure.duration_s = request.url, started_at, time.monotonic() - started
            raise failure from e
        reply = response.extensions[REPLY]
        return Answer(
            status=reply.status,
            headers=reply.headers,
            body=reply.body,
            truncated=reply.truncated,
            url=request.url,
            started_at=started_at,
            duration_s=time.monotonic() - started,
        )

    def close(self) -> None:
        """Close the kept connections; later calls fail with ``platform``."""
        self._client.close()

    @property
    def idle_connections(self) -> int:
        """Connections that are kept now."""
        return self._pool.idle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _context(self, certificate: ClientCertificate | None) -> ssl.SSLContext:
        try:
            # One at a time: threads that begin together would each make the same.
            with self._context_lock:
                return self._contexts(certificate)
        except certificates.CertificateUnusable as e:
            raise CallFailed(ErrorCode.TEMPLATE, str(e)) from None

    def _make_context(self, certificate: ClientCertificate | None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.load_verify_locations(certifi.where())
        if self._ca_file:
            context.load_verify_locations(self._ca_file)
        if certificate is not None:
            certificates.load(context, certificate.chain, certificate.key)
        context.set_alpn_protocols(["http/1.1"])
        return context


def _httpx_request(request: OutboundRequest, deadline: Deadline) -> httpx.Request:
    return httpx.Request(
        request.method,
        request.target.httpx_url,
        headers=[(name.encode(), value.encode()) for name, value in request.headers],
        stream=httpx.ByteStream(request.body),
        extensions={TARGET: request.target, DEADLINE: deadline, CERTIFICATE: request.client_certificate, "timeout": {}},
    )


class _NoCookies(httpx.Cookies):
    """Takes no cookies: they would go from one delivery to the next, and a receiver could fill the memory with them."""

    def extract_cookies(self, response: httpx.Response) -> None:
        pass


class _Client(httpx.Client):
    @property
    def cookies(self) -> httpx.Cookies:
        return _NO_COOKIES

    @cookies.setter
    def cookies(self, cookies: object) -> None:
        raise AttributeError("this client keeps no cookies")


_NO_COOKIES = _NoCookies()
