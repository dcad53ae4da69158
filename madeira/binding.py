"""Whether this machine can listen where the settings say, asked before a server begins, so that it is told in one line.

What runs the servers would try again and again, and tell it in its own words, which name no setting.
"""

import errno
import socket
import time
from typing import Final

from madeira.errors import SettingsError

#: What another port mends; all else is the host's fault.
_OF_PORT: Final = (errno.EADDRINUSE, errno.EACCES)

#: Seconds between two tries to get a port that is in use.
_PAUSE_S: Final = 0.1


def require(host: str, port: int, of_port: str, of_host: str = "MADEIRA_HOST", *, patience_s: float = 0.0) -> None:
    """Make sure that `port` of `host` can be listened on; `of_port` and `of_host` are the settings that say so.

    A port that is in use is tried again for `patience_s` seconds: of a server that was killed, its processes may have it yet.

    Raises:
        SettingsError: it cannot; which setting is to be changed is told.
    """
    deadline = time.monotonic() + patience_s
    while error := _try(host, port):
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            continue
        wrong = of_port if code in _OF_PORT else of_host
        raise SettingsError(f"cannot listen on {host} port {port}: {_reason(error)}; set {wrong} to another one")


def refusal_of_host(host: str) -> str | None:
    """Why this machine can listen on no port of `host`; None when it can."""
    error = _try(host, 0)
    return _reason(error) if error else None


def _try(host: str, port: int) -> OSError | UnicodeError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # A machine without IPv6 has not even a socket for it.
        with socket.socket(family) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((host, port))
    except (OSError, UnicodeError) as e:
        return e
    return None


def _reason(error: OSError | UnicodeError) -> str:
    return getattr(error, "strerror", None) or "the host is no possible name"
