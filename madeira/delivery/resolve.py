"""Name resolution that can be waited for with a deadline.

``getaddrinfo`` cannot be interrupted, so each look-up runs in a short-lived daemon thread: a resolver that hangs costs the
call its deadline and nothing else, and does not hold up the end of the process. Callers that want the same name at the same
moment share one look-up, so that one name that hangs takes one thread, whatever number of deliveries wait for it.

What was found is believed for three seconds: a busy receiver costs no look-up per call, and a name that has moved is noticed
soon. A failure is not remembered.
"""

import functools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from madeira.delivery.answer import CallFailed
from madeira.states import ErrorCode

#: Look-ups that may be under way at once; further names fail, to be tried again later.
MAX_LOOKUPS: Final = 64

#: Seconds that the addresses of a name are believed.
FRESH_S: Final = 3.0

#: Names whose addresses are remembered, the oldest look-up forgotten first.
MAX_KNOWN: Final = 4096

#: One address as `socket.getaddrinfo` gives it: family and socket address.
Address = tuple[socket.AddressFamily, Any]


class Resolver:
    """Resolves host names within a deadline.

    `getaddrinfo` is called as the one of `socket` is; `clock` gives seconds.
    """

    def __init__(
        self,
        *,
        getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._getaddrinfo = getaddrinfo
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], Future[tuple[Address, ...]]] = {}
        self._known: dict[tuple[str, int], tuple[float, tuple[Address, ...]]] = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> tuple[Address, ...]:
        """The addresses that `host` has now or had `FRESH_S` ago, in the system's order of preference; at least one.

        Raises:
            CallFailed: with ``dns``.
        """
        known = self._known.get((host, port))
        if known is not None and known[0] > self._clock():
            return known[1]
        literal = _literal(host, port)
        if literal is not None:
            return literal
        try:
            return self._look_up(host, port).result(timeout_s)
        except TimeoutError:
            raise CallFailed(ErrorCode.DNS, f"the name {host} was not resolved within {timeout_s:.1f} s") from None
        except (OSError, UnicodeError) as e:
            raise CallFailed(ErrorCode.DNS, f"the name {host} cannot be resolved: {_text(e)}") from None

    def _look_up(self, host: str, port: int) -> Future[tuple[Address, ...]]:
        key = (host, port)
        with self._lock:
            shared = self._under_way.get(key)
            if shared is not None:
                return shared
            if len(self._under_way) >= MAX_LOOKUPS:
                raise CallFailed(ErrorCode.DNS, f"the name {host} was not resolved: {MAX_LOOKUPS} other look-ups are under way")
            future: Future[tuple[Address, ...]] = Future()
            self._under_way[key] = future
        thread = threading.Thread(target=self._run, args=(key, future), name=f"resolve {host}", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self._end(key)
            raise CallFailed(ErrorCode.PLATFORM, f"no thread for resolving {host}: {e}") from None
        return future

    def _run(self, key: tuple[str, int], future: Future[tuple[Address, ...]]) -> None:
        try:
            found = self._getaddrinfo(*key, type=socket.SOCK_STREAM)
            addresses = tuple(dict.fromkeys((family, address) for family, _, _, _, address in found))
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "it has no address")
        except (OSError, UnicodeError) as e:
            self._end(key)
            future.set_exception(e)
        else:
            self._end(key, addresses)
            future.set_result(addresses)

    def _end(self, key: tuple[str, int], found: tuple[Address, ...] | None = None) -> None:
        with self._lock:
            self._under_way.pop(key, None)
            # Taken out first, so that the order of the dictionary is that of the look-ups.
            self._known.pop(key, None)
            if found is not None:
                self._known[key] = (self._clock() + FRESH_S, found)
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]


@functools.lru_cache(maxsize=4096)
def _literal(host: str, port: int) -> tuple[Address] | None:
    """The address that `host` is already, without asking anybody; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return ((family, (host, port) if family == socket.AF_INET else (host, port, 0, 0)),)
    return None


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
