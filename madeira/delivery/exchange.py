"""What is kept of a call that failed, beside its verdict: the request as it was made, and the headers of the answer.

For whoever asks later why a receiver refused. Nothing in it lets anybody call the receiver, or signs anything: of the headers
that the endpoint brings only what the event alone made is shown, signatures never, and credentials that the receiver echoes or
gives out are masked. The body is not kept a second time: it is the same bytes on every attempt, follows from the event (or stands
with the delivery, where a template made it), and its digest tells whether it is those.
"""

import hashlib
import json
import re
from typing import Any, Final

from madeira.delivery.answer import Answer
from madeira.delivery.masking import MASK, masked
from madeira.delivery.request import OutboundRequest
from madeira.records import Endpoint

#: Characters of the value of a header that are kept.
MAX_VALUE: Final = 512

#: Bytes of the answer's headers that are kept.
MAX_HEADERS: Final = 4096

#: What stands for a value that is not shown.
HIDDEN: Final = MASK.decode()

#: Of a request: made with a secret.
SIGNATURES: Final = frozenset({"webhook-signature", "x-madeira-signature", "authorization"})

#: Of an answer: what the receiver gives out to let its caller in, by the whole name or a part of it.
_GIVEN_OUT: Final = re.compile(r"(?i)cookie|authentication|authoriz|token|secret|password|signature|api-?key")

#: The template of a header that is nothing but one value of the event.
_OF_EVENT: Final = re.compile(r"""\s*\{\{[^{}"'%#]*\}\}\s*""")

#: What would break a line, a terminal, or Postgres' notion of a text.
_UNSHOWABLE: Final = re.compile(r"[^\x20-\x7e\xa0-\u2027\u202f-\ud7ff\ue000-\U0010ffff\n]")


def kept(request: OutboundRequest, answer: Answer | None, endpoint: Endpoint) -> str:
    """The JSON text that is kept of a call; `answer` is None where none came."""
    document: dict[str, Any] = {
        "request": {
            "method": request.method,
            "headers": [[name, _sent(name, value, endpoint)] for name, value in request.headers],
            "body_length": len(request.body),
            "body_sha256": hashlib.sha256(request.body).hexdigest(),
        },
        "answer": None if answer is None else _received(answer, endpoint),
    }
    return json.dumps(document)


def _sent(name: str, value: str, endpoint: Endpoint) -> str:
    template = endpoint.headers.get(name)
    if template is not None:
        return _bounded(_UNSHOWABLE.sub(" ", value)) if _OF_EVENT.fullmatch(template) else HIDDEN
    return HIDDEN if name.lower() in SIGNATURES else value


def _received(answer: Answer, endpoint: Endpoint) -> dict[str, Any]:
    """The headers of an answer; looked through for credentials all at once, which is cheaper than one by one."""
    lines = (
        f"{name}: {HIDDEN if _GIVEN_OUT.search(name) else value.replace(chr(10), ' ')}" for name, value in answer.headers.items()
    )
    text = "\n".join(lines).encode(errors="replace")
    shown = masked(text, endpoint, first=MAX_HEADERS).decode(errors="replace")
    found = _UNSHOWABLE.sub(" ", shown).split("\n")
    pairs = [(name, value) for name, colon, value in (line.partition(": ") for line in found) if colon]
    return {"headers": [[name, _bounded(value)] for name, value in pairs], "complete": len(text) <= MAX_HEADERS}


def _bounded(value: str) -> str:
    return value if len(value) <= MAX_VALUE else value[:MAX_VALUE] + "…"
