"""Templates of an endpoint: what it makes of an event for the URL, the headers and the body of a call.

Bodies and headers are written in Jinja2 (`madeira.templates.sandbox` says which part of it), URLs in URI templates
(`madeira.templates.urls`). All of them read the values of `madeira.event_values`. A template that cannot be carried out for
an event raises `TemplateFailed`, and so does one whose result could not be sent as it is: a body that is no strict JSON, a
header that would break the message, a URL that leads to another host than the template names.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from madeira import strict_json
from madeira.templates.failure import TemplateFailed
from madeira.templates.sandbox import check, render
from madeira.templates.urls import check as check_url
from madeira.templates.urls import expand as url

#: Characters of a header's value, at most.
MAX_HEADER: Final = 8192

#: As in the configuration: what goes into a header as it is.
_HEADER: Final = re.compile(r"[\x20-\x7e\xa0-\xff\t]*")


def is_url_template(text: str) -> bool:
    """Whether `text` is more than a plain URL."""
    return "{" in text


def is_header_template(text: str) -> bool:
    """Whether `text` is more than a plain value."""
    return "{{" in text


def check_body(text: str) -> str | None:
    """Why `text` cannot be the template of a body; None when it can."""
    return check(text)


def check_header(text: str) -> str | None:
    """Why `text` cannot be the template of a header's value; None when it can."""
    return check(text)


def body(text: str, values: Mapping[str, Any]) -> str:
    """The body that the template `text` makes of `values`: a JSON object, array or other value.

    Raises:
        TemplateFailed: something in the template is missing or cannot be done, or the result is no strict JSON.
    """
    made = render(text, values)
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
    made = render(text, values).strip(" \t")
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
    "check_body",
    "check_header",
    "check_url",
    "header",
    "is_header_template",
    "is_url_template",
    "url",
]
