"""Whether the keys of this process are those that the running processes have.

A secret is sealed with this process's first key. If the others do not have that key they cannot open it, and a source or an
endpoint that worked is out of use, without anybody having asked for that: it suffices that somebody applies a file from a shell
with a key of its own. The other processes cannot be asked; what they have sealed can be looked at. So nothing is sealed by keys
that open nothing of what is stored, and a file does not replace what they do not open unless that is asked for.
"""

from collections.abc import Mapping
from typing import Any, Final

from madeira.routing import secrets
from madeira.routing.config import Problems
from madeira.routing.fields import KINDS, Kind
from madeira.routing.secrets import Place
from madeira.sealing import Sealer, SealError, is_sealed
from madeira.store.configuration import Snapshot

_REMEDY: Final = (
    "add that key to MADEIRA_SECRET_KEY; if it is lost, `madeira apply --replace-secrets` seals anew with the key here"
)


def sealed_anew(kind: Kind, spec: Mapping[str, Any], *sources: Mapping[str, Any]) -> list[Place]:
    """The places of `spec` whose secrets were sealed just now: they are in none of `sources`, where secrets came from."""
    known = {text for source in sources for text in secrets.texts(kind, source).values()}
    return [place for place, text in secrets.texts(kind, spec).items() if is_sealed(text) and text not in known]


def refuse_foreign(places: list[Place], stored: Snapshot, sealer: Sealer, problems: Problems) -> None:
    """Tell `problems` that secrets were sealed at `places` with keys that open nothing of what is stored, if it is so."""
    if places and _is_foreign(stored, sealer):
        for place in places:
            problems.add(str(place), f"not sealed: all that is stored was sealed with a key that is not here; {_REMEDY}")


def refuse_unopened(kind: Kind, before: Mapping[str, Any], sealer: Sealer, problems: Problems) -> None:
    """Tell `problems` which secrets of `before`, which are to be replaced, cannot be opened here."""
    for place, text in secrets.texts(kind, before).items():
        if is_sealed(text) and not _opens(sealer, text):
            problems.add(str(place), f"what is stored was sealed with a key that is not here; {_REMEDY}")


def _is_foreign(stored: Snapshot, sealer: Sealer) -> bool:
    """Whether something sealed is stored, and nothing of it can be opened."""
    is_there = False
    for kind in KINDS:
        for one in stored.of(kind).values():
            for text in secrets.texts(kind, one.spec).values():
                if is_sealed(text):
                    if _opens(sealer, text):
                        return False
                    is_there = True
    return is_there


def _opens(sealer: Sealer, text: str) -> bool:
    try:
        sealer.open(text)
    except SealError:
        return False
    return True
