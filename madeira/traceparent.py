"""The header ``traceparent`` of W3C Trace Context, read as its receivers must.

A version to come may have more parts behind the four that are known, and is to be read like version 00 all the same; what goes
out is version 00 always. One reader serves intake and delivery: what the one takes the other must not drop.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Final

_PARTS: Final = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)

_HEX_TRACE: Final = re.compile(r"(?!0{32})[0-9a-f]{32}")

#: The flag "sampled", the one that all versions share.
_SAMPLED: Final = 0x01


@dataclass(frozen=True, slots=True)
class Traceparent:
    """What it says, in the terms of version 00."""

    trace_id: str
    parent_id: str
    flags: str

    def __str__(self) -> str:
        """The header."""
        return f"00-{self.trace_id}-{self.parent_id}-{self.flags}"


def parse(text: str) -> Traceparent | None:
    """The parts of a header; None when it is malformed."""
    found = _PARTS.fullmatch(text)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "00":
        return None if more is not None else Traceparent(trace_id, parent_id, flags)
    return Traceparent(trace_id, parent_id, f"{int(flags, 16) & _SAMPLED:02x}")


def trace_of(trace_id: str) -> str:
    """The trace of an event whose upstream brought none: its own trace id, if that can be one, or a digest of it."""
    if _HEX_TRACE.fullmatch(trace_id):
        return trace_id
    return hashlib.sha256(trace_id.encode()).hexdigest()[:32]
