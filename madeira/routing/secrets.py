"""Where secrets stand in a document, and what is done to all of them: opened, sealed, hidden, looked up.

In the database a secret is ``sealed:…`` or a reference ``env:NAME``; what a person wrote as a literal is sealed before it gets
there. What is shown is the reference, or ``hidden`` with its place, which a change may send back to keep that secret.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from madeira import digits
from madeira.routing.fields import FIELDS, Field, Kind
from madeira.routing.values import ENV_PREFIX, HIDDEN, is_hidden
from madeira.sealing import Sealer, SealError, is_sealed

#: Where the secrets stand that events and calls are signed with.
SIGNING: Final = "secrets"

#: Characters of such a secret, at least, when it is first kept: whoever has one signed message can try shorter ones offline. What
#: was kept before goes on. Standard Webhooks recommends 24 bytes; but a receiver may have one that is nobody's to choose.
SHORTEST: Final = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a secret stands: the path of its list, table or field, and its number or key there."""

    path: str
    #: From 0, in a list.
    number: int | None = None
    key: str = ""

    def __str__(self) -> str:
        return f"{self.path}[{self.number}]" if self.number is not None else f"{self.path}.{self.key}" if self.key else self.path


#: Is given the place and the text of a secret, and gives the text to put there.
Change = Callable[[Place, str], str]
#: Is told a place, and what is wrong with it.
Tell = Callable[[str, str], None]


def changed(kind: Kind, document: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """A copy of `document` in which each text that is a secret went through `change`; whatever is malformed stays."""
    return _changed(FIELDS[kind], document, change, "")


def _changed(fields: tuple[Field, ...], document: Mapping[str, Any], change: Change, at: str) -> dict[str, Any]:
    found = dict(document)
    for field in fields:
        if field.name not in found:
            continue
        place, value = f"{at}{field.name}", found[field.name]
        if field.fields and isinstance(value, dict):
            found[field.name] = _changed(field.fields, value, change, f"{place}.")
        elif field.hides == "list" and isinstance(value, list):
            found[field.name] = [_one(Place(place, number), one, change) for number, one in enumerate(value)]
        elif field.hides == "table" and isinstance(value, dict):
            found[field.name] = {key: _one(Place(place, key=key), one, change) for key, one in value.items()}
        elif field.hides == "text":
            found[field.name] = _one(Place(place), value, change)
    return found


def _one(place: Place, value: Any, change: Change) -> Any:
    return change(place, value) if isinstance(value, str) else value


def texts(kind: Kind, document: Mapping[str, Any]) -> dict[Place, str]:
    """The secrets of `document` as they stand there, by their places."""
    found: dict[Place, str] = {}

    def remember(place: Place, text: str) -> str:
        found[place] = text
        return text

    changed(kind, document, remember)
    return found


def variables(kind: Kind, document: Mapping[str, Any]) -> set[str]:
    """The environment variables that `document` names."""
    return {text.removeprefix(ENV_PREFIX) for text in texts(kind, document).values() if text.startswith(ENV_PREFIX)}


def opened(kind: Kind, document: Mapping[str, Any], sealer: Sealer, problem: Tell, known: dict[str, str]) -> dict[str, Any]:
    """`document` with what is sealed in clear; `problem` is told the place and the reason of what cannot be opened.

    `known` gets, for each text in clear, the sealed one that it came from.
    """

    def change(place: Place, text: str) -> str:
        if not is_sealed(text):
            return text
        try:
            clear = sealer.open(text)
        except SealError as e:
            problem(str(place), str(e))
            return text
        known.setdefault(clear, text)
        return clear

    return changed(kind, document, change)


def sealed(kind: Kind, document: Mapping[str, Any], sealer: Sealer, problem: Tell, known: Mapping[str, str]) -> dict[str, Any]:
    """`document`, as `opened` gives it, with everything sealed that is no reference; what is `known` is not sealed again."""

    def change(place: Place, text: str) -> str:
        if text.startswith(ENV_PREFIX):
            return text
        if text in known:
            return known[text]
        if place.path == SIGNING and len(text) < SHORTEST:
            problem(
                str(place),
                f"is shorter than {SHORTEST} characters, and found out by trying; `openssl rand -base64 32` makes a secret",
            )
            return text
        try:
            return sealer.seal(text)
        except UnicodeEncodeError:
            # Half of a surrogate pair, which no check of a value lets pass: it is told already.
            return text
        except SealError as e:
            problem(
                str(place), f"a literal cannot be kept, since {e}; or write {ENV_PREFIX}NAME to have it read from the environment"
            )
            return text

    return changed(kind, document, change)


def hidden(kind: Kind, document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` as it may be shown: references as they are, all else as ``hidden``, in lists with its number."""

    def change(place: Place, text: str) -> str:
        if text.startswith(ENV_PREFIX):
            return text
        return HIDDEN if place.number is None else f"{HIDDEN}:{place.number + 1}"

    return changed(kind, document, change)


def kept(kind: Kind, document: Mapping[str, Any], before: Mapping[str, Any], problem: Tell) -> dict[str, Any]:
    """`document` with each ``hidden`` replaced by the secret that it stands for in `before`."""
    places = texts(kind, before)

    def change(place: Place, text: str) -> str:
        if not is_hidden(text):
            return text
        found = places.get(place if text == HIDDEN else Place(place.path, _number(text)))
        if found is None or (text == HIDDEN) != (place.number is None):
            which = f"{HIDDEN}:1, {HIDDEN}:2 and so on stand" if place.number is not None else f"{HIDDEN} stands"
            problem(str(place), f"{which} for a secret that is there already; there is none for this: send the secret")
            return text
        return found

    return changed(kind, document, change)


def _number(text: str) -> int:
    found = digits.plain(text.removeprefix(f"{HIDDEN}:"), 3)
    return -1 if found is None else found - 1
