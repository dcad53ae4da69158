"""Ids that are made here: one kind, for events that came without one. And what names look like that people give.

UUIDs of version 7 begin with the time, so that neighbours in time are neighbours in an index. Both sides make them: the API
for posts without an id, and the Python client before its first try, so that its own repetitions are known for what they are.
"""

import os
import re
import time
import uuid
from typing import Final

#: What a source, an endpoint, a route or a token may be called.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def uuid7() -> str:
    """A UUID of version 7: 48 bits of Unix milliseconds, then 74 random ones."""
    milliseconds = time.time_ns() // 1_000_000
    bits = milliseconds << 80 | int.from_bytes(os.urandom(10))
    bits = bits & ~(0xF << 76) | 0x7 << 76
    bits = bits & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=bits))
