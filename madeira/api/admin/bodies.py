"""The bodies of the admin's requests: small JSON objects, read as strictly as an event."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from madeira import reasons
from madeira.api import problems, reading
from madeira.api.problems import FieldError
from madeira.strict_json import Document

#: Bytes of a body; a template of a body and some certificates fit well.
MAX_BODY: Final = 262_144

#: Media type of a change by RFC 7396.
MERGE_PATCH: Final = "application/merge-patch+json"

#: Makes a field's value of what was given; raises ValueError.
Check = Callable[[Any], Any]


def document(environ: Mapping[str, Any], *, patch: bool = False, optional: bool = False) -> Document:
    """The JSON object in the body.

    `patch`: RFC 7396's media type is taken too. `optional`: no body is the same as an empty object.

    Raises:
        Problem: 400, 408, 413, 415, or 422 when it is no object.
    """
    if optional:
        raw = reading.json_if_any(environ, limit=MAX_BODY)
        if not raw:
            return Document({}, {})
    else:
        media_type = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
        reading.only(environ, MERGE_PATCH if patch and media_type == MERGE_PATCH else reading.JSON)
        raw = reading.body(environ, limit=MAX_BODY)
    return parsed(raw)


def parsed(raw: bytes, *, optional: bool = False) -> Document:
    """The JSON object that a body is; where it is `optional`, the refusal says so.

    Raises:
        Problem: 400, or 422 when it is no object.
    """
    found = reading.parsed(raw)
    if found is None:
        raise problems.invalid([FieldError("body", "must be a JSON object" + (", or be left out" if optional else ""))])
    return found


def checked(
    values: Mapping[str, Any], checks: Mapping[str, Check], what: str, *, required: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The fields of `what`, each as its check made it; `required` are those that must be there, and what is told of their lack.

    Raises:
        Problem: 422, with one entry for each field that is unknown, missing or wrong.
    """
    errors = [FieldError(name, told) for name, told in required.items() if name not in values]
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in checks:
            errors.append(FieldError(problems.shown(name), f"is no field of {what}; known: {', '.join(checks)}"))
            continue
        try:
            found[name] = checks[name](value)
        except ValueError as e:
            errors.append(FieldError(name, str(e)))
    if errors:
        raise problems.invalid(errors)
    return found


def unknown(values: Mapping[str, Any], known: frozenset[str], what: str) -> list[FieldError]:
    """An error for each field that `what` does not have."""
    return [FieldError(problems.shown(name), f"is no field of {what}") for name in values if name not in known]


def reason(given: Any) -> str:
    """The reason of an action, from a query or a body; it may be empty.

    Raises:
        ValueError: it is no reason.
    """
    return reasons.check(_text(given))


def reason_if_any(values: Mapping[str, Any], errors: list[FieldError]) -> str | None:
    """The reason among `values`, if there is one; what is wrong with it is added to `errors`."""
    given = values.get("reason")
    try:
        return None if given is None else reason(given)
    except ValueError as e:
        errors.append(FieldError("reason", str(e)))
        return None


def needed_reason(given: Any) -> str:
    """The reason of an action that somebody will ask for.

    Raises:
        ValueError: it says nothing, or is no reason.
    """
    return reasons.check_needed(_text(given))


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"must be a string of at most {reasons.MAX_REASON} printable characters")  # noqa: TRY004  # all that is wrong is told in one way
    return given


def why(values: Mapping[str, Any], *, needed: bool) -> str | None:
    """The reason in a body that holds nothing else; null and an empty text are none.

    Raises:
        Problem: 422.
    """
    given = {name: value for name, value in values.items() if name != "reason" or value not in (None, "")}
    required = {"reason": "is required: it is what the audit tells whoever asks why"} if needed else {}
    return checked(given, {"reason": needed_reason}, "this action", required=required).get("reason")


def flag(given: Any) -> bool:
    """True or false.

    Raises:
        ValueError: it is neither.
    """
    if given is not True and given is not False:
        raise ValueError("must be true or false")
    return bool(given)
