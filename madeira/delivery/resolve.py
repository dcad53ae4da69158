"""Name resolution that can be waited for with a deadline.

``getaddrinfo`` cannot be interrupted, so each look-up runs in a short-lived daemon thread: a resolver that hangs costs the
call its deadline and nothing else, and does not hold up the end of the process. Callers that want the same name at the same
moment share one look-up, so that one name that hangs takes one thread, whatever number of deliveries wait for it.
"""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from madeira.delivery.answer import CallFailed
from madeira.states import ErrorCode

#: Look-ups that may be under way at once; further names fail, to be tried again later.
MAX_LOOKUPS: Final = 64

#: One address as `socket.getaddrinfo` gives it: family and socket address.
Address = tuple[socket.AddressFamily, Any]


class Resolver:
    """Resolves host names within a deadline."""

    def __init__(self, *, getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._getaddrinfo = getaddrinfo
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], Future[list[Address]]] = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """The addresses of `host`, in the system's order of preference; at least one.

        Raises:
            CallFailed: with ``dns``.
        """
        literal = _literal(host, port)
        if literal is not None:
            return [literal]
        try:
            return self._look_up(host, port).result(timeout_s)
        except TimeoutError:
            raise CallFailed(ErrorCode.DNS, f"the name {host} was not resolved within {timeout_s:.1f} s") from None
        except (OSError, UnicodeError) as e:
            raise CallFailed(ErrorCode.DNS, f"the name {host} cannot be resolved: {_text(e)}") from None

    def _look_up(self, host: str, port: int) -> Future[list[Address]]:
        key = (host, port)
        with self._lock:
            shared = self._under_way.get(key)
            if shared is not None:
                return shared
            if len(self._under_way) >= MAX_LOOKUPS:
                raise CallFailed(ErrorCode.DNS, f"the name {host} was not resolved: {MAX_LOOKUPS} other look-ups are under way")
            future: Future[list[Address]] = Future()
            self._under_way[key] = future
        thread = threading.Thread(target=self._run, args=(key, future), name=f"resolve {host}", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self._end(key)
            raise CallFailed(ErrorCode.PLATFORM, f"no thread for resolving {host}: {e}") from None
        return future

    def _run(self, key: tuple[str, int], future: Future[list[Address]]) -> None:
        try:
            found = self._getaddrinfo(*key, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            self._end(key)
            future.set_exception(e)
        else:
            self._end(key)
            future.set_result(list(dict.fromkeys((family, address) for family, _, _, _, address in found)))

    def _end(self, key: tuple[str, int]) -> None:
        with self._lock:
            self._under_way.pop(key, None)


def _literal(host: str, port: int) -> Address | None:
    """The address that `host` is already, without asking anybody; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return (family, (host, port) if family == socket.AF_INET else (host, port, 0, 0))
    return None


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
