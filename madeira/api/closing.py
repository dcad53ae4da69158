"""How the API's socket is closed: nobody who has got a connection is cut off.

Closing a listening socket resets what connected since the last look at its queue. So before the last look the kernel is told to
drop whatever begins a connection (SYN): its sender tries again after a second, and is refused by then, as it would be by a
port where nobody listens, which clients and load balancers take for what it is.
"""

import ctypes
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

from madeira import log

#: Linux's ``SO_ATTACH_FILTER`` (asm-generic/socket.h).
_ATTACH_FILTER: Final = 26

#: Seconds for handshakes that are under way.
_HANDSHAKE_S: Final = 0.1

#: A classic BPF program over a TCP header: byte 13 holds its flags (RFC 9293, section 3.1), of which SYN is the second bit.
#: Load the byte; is the bit set? then pass nothing; else pass all. Each: code, jump if true, jump if false, operand.
_PROGRAM: Final = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

_log = log.get(__name__)


def refuse_new(listener: Any) -> bool:
    """Let nobody begin a connection to a listening TCP socket, for good and in all processes that share it.

    Who is connected already can be accepted as before.

    Returns:
        Whether it could be done.
    """
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    code = b"".join(struct.pack("HBBI", *step) for step in _PROGRAM)
    held = ctypes.create_string_buffer(code, len(code))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(_PROGRAM), ctypes.addressof(held)))
    except OSError as e:
        _log.info("http.no_filter", error=str(e))
        return False
    return True


def close_gently(server: Any) -> None:
    """Make gunicorn's master refuse new connections before it closes its sockets and stops its workers.

    Not where the sockets go on without it: another master has them, or systemd.
    """
    stop: Callable[..., None] = server.stop

    def gently(graceful: bool = True) -> None:
        if graceful and server.reexec_pid == server.master_pid == 0 and not server.systemd:
            refused = [refuse_new(listener) for listener in server.LISTENERS]
            if any(refused):
                time.sleep(_HANDSHAKE_S)
        stop(graceful)

    server.stop = gently
