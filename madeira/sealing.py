"""Secrets at rest: sealed with keys that only the processes have, so that a copy of the database tells none of them.

A sealed text is ``sealed:`` and a Fernet token (AES-128-CBC with an HMAC over it and the time). There can be several keys:
the first one seals, all of them open, so that a key is changed by putting a new one in front, sealing everything anew, and
then taking the old one away. Sealing the same text twice gives two different results: compare what was opened.
"""

from typing import Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from madeira.errors import MadeiraError

#: What a sealed text begins with.
PREFIX: Final = "sealed:"


class SealError(MadeiraError):
    """Raised when a text cannot be sealed or opened with the keys that are there, or when one of them is no key."""


class Sealer:
    """Seals and opens texts with `keys`, the first one for sealing; there may be none.

    Raises:
        SealError: one of them is not a key; which one is told, never the key.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        found = []
        for number, key in enumerate(keys, 1):
            try:
                found.append(Fernet(key.encode()))
            except (ValueError, TypeError):
                raise SealError(f"key number {number} is not a key: make one with `madeira keygen`") from None
        self._first = found[0] if found else None
        self._all = MultiFernet(found) if found else None

    @property
    def has_key(self) -> bool:
        """Whether anything can be sealed."""
        return self._first is not None

    def seal(self, text: str) -> str:
        """`text`, sealed with the first key.

        Raises:
            SealError: there is no key.
        """
        if self._first is None:
            raise SealError("there is no key: set MADEIRA_SECRET_KEY (`madeira keygen` makes one)")
        return PREFIX + self._first.encrypt(text.encode()).decode("ascii")

    def open(self, sealed: str) -> str:
        """What `sealed` holds.

        Raises:
            SealError: no key opens it.
        """
        if self._all is None:
            raise SealError("it is sealed, and there is no key: set MADEIRA_SECRET_KEY to the key that sealed it")
        try:
            return self._all.decrypt(_token(sealed)).decode()
        except InvalidToken:
            raise SealError("no key in MADEIRA_SECRET_KEY opens it: add the one that sealed it, or set the secret anew") from None

    def is_sealed_by_first(self, sealed: str) -> bool:
        """Whether the first key opens `sealed`, so that it need not be sealed anew."""
        if self._first is None:
            return False
        try:
            self._first.decrypt(_token(sealed))
        except InvalidToken:
            return False
        return True


def is_sealed(text: str) -> bool:
    """Whether `text` is a sealed one."""
    return text.startswith(PREFIX)


def generate() -> str:
    """A new key, as MADEIRA_SECRET_KEY takes it."""
    return Fernet.generate_key().decode("ascii")


def _token(sealed: str) -> bytes:
    return sealed.removeprefix(PREFIX).encode("utf-8", "replace")
