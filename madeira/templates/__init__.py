"""Templates of an endpoint: what it makes of an event for the URL, the headers and the body of a call.

Bodies and headers are written in Jinja2 (`madeira.templates.sandbox` says which part of it), URLs in URI templates
(`madeira.templates.urls`). All of them read the values of `madeira.event_values`. A template that cannot be carried out for
an event raises `TemplateFailed`, and so does one whose result could not be sent as it is: a body that is no strict JSON, a
header that would break the message, a URL that leads to another host than the template names.
"""

import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from madeira import strict_json
from madeira.records import Endpoint
from madeira.templates.failure import TemplateFailed
from madeira.templates.urls import check as check_url
from madeira.templates.urls import expand as url

#: Characters of a header's value, at most.
MAX_HEADER: Final = 8192

#: As in the configuration: what goes into a header as it is.
_HEADER: Final = re.compile(r"[\x20-\x7e\xa0-\xff\t]*")


def _sandbox() -> ModuleType:
    """Jinja2 and what we allow of it, once there is a template: an eighth of the time of a start."""
    from madeira.templates import sandbox

    return sandbox


def body_of(endpoint: Endpoint, values: Mapping[str, Any]) -> str | None:
    """The body that `endpoint` makes of an event; None when it is the standard one.

    Raises:
        TemplateFailed: it cannot be made; the reason says that it is about the body.
    """
    if endpoint.body is None:
        return None
    return _named("body", body, endpoint.body, values)


def url_of(endpoint: Endpoint, values: Mapping[str, Any]) -> str:
    """The URL that `endpoint` calls for an event; empty when that is the callback address and the event has none.

    Raises:
        TemplateFailed: it cannot be made; the reason says that it is about the URL.
    """
    if endpoint.is_callback:
        return values["target_uri"] or ""
    return _named("url", url, endpoint.url, values)


def headers_of(endpoint: Endpoint, values: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers of `endpoint` for an event.

    Raises:
        TemplateFailed: one cannot be made; the reason names it.
    """
    made = {
        name: _named(f"header {name}", header, text, values)
        for name, text in endpoint.headers.items()
        if is_header_template(text)
    }
    # In the order of the endpoint.
    return {name: made.get(name, text) for name, text in endpoint.headers.items()} if made else endpoint.headers


def _named(what: str, make: Callable[[str, Mapping[str, Any]], str], text: str, values: Mapping[str, Any]) -> str:
    try:
        return make(text, values)
    except TemplateFailed as e:
        raise TemplateFailed(f"{what}: {e.reason}") from None


def is_header_template(text: str) -> bool:
    """Whether `text` is more than a plain value."""
    return "{{" in text


def check_body(text: str) -> str | None:
    """Why `text` cannot be the template of a body; None when it can."""
    return _check(text)


def check_header(text: str) -> str | None:
    """Why `text` cannot be the template of a header's value; None when it can."""
    return _check(text)


def _render(text: str, values: Mapping[str, Any]) -> str:
    made: str = _sandbox().render(text, values)
    return made


def _check(text: str) -> str | None:
    wrong: str | None = _sandbox().check(text)
    return wrong


def body(text: str, values: Mapping[str, Any]) -> str:
    """The body that the template `text` makes of `values`: a JSON object, array or other value.

    Raises:
        TemplateFailed: something in the template is missing or cannot be done, or the result is no strict JSON.
    """
    made = _render(text, values)
    try:
        strict_json.parse(made.encode())
    except UnicodeEncodeError:
        raise TemplateFailed("the result holds half a character (a lone surrogate); pass texts through tojson") from None
    except strict_json.NotStrictJson as e:
        raise TemplateFailed(f"the result is not JSON: {_without_values(e)}; pass values through tojson") from None
    return made


def header(text: str, values: Mapping[str, Any]) -> str:
    """The value of a header that the template `text` makes of `values`, without spaces around it.

    Raises:
        TemplateFailed: something in the template is missing or cannot be done, or the result cannot stand in a header.
    """
    made = _render(text, values).strip(" \t")
    if len(made) > MAX_HEADER:
        raise TemplateFailed(f"the result is longer than {MAX_HEADER} characters")
    if not _HEADER.fullmatch(made):
        raise TemplateFailed("the result holds a line break or another character that cannot stand in a header")
    return made


def _without_values(error: strict_json.NotStrictJson) -> str:
    """What is wrong, without the key or the number that the message may quote."""
    message = str(error)
    for beginning, instead in (("the key", "a key occurs twice in one object"), ("the number", "a number is too large")):
        if message.startswith(beginning):
            return instead
    return message


__all__ = [
    "TemplateFailed",
    "body",
    "body_of",
    "check_body",
    "check_header",
    "check_url",
    "header",
    "headers_of",
    "is_header_template",
    "url",
    "url_of",
]
