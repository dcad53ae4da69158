"""Headers of a call that an endpoint cannot set: one list, for the check of the configuration file and for the request.

With two lists a header that the file may name would be dropped from every call, and nobody would be told.
"""

from typing import Final

#: In lower case: what Madeira sets itself, and what decides where a message ends or how it is encoded.
RESERVED_HEADERS: Final = frozenset(
    {
        "content-type",
        "user-agent",
        "x-trace-id",
        "traceparent",
        "tracestate",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
        "x-madeira-timestamp",
        "x-madeira-signature",
        "x-madeira-attempt",
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "accept-encoding",
    }
)

_PREFIXES: Final = ("webhook-", "x-madeira-", "proxy-")


def is_reserved(name: str) -> bool:
    """Whether an endpoint cannot set the header `name`, in whatever case it is written."""
    return name.lower() in RESERVED_HEADERS or name.lower().startswith(_PREFIXES)
