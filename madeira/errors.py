"""Every error that Madeira raises on purpose, in one tree.

A message names the value that is wrong and what to do about it: whoever reads it is on call.
"""

from dataclasses import dataclass


class MadeiraError(Exception):
    """Base of all errors of Madeira."""


class SettingsError(MadeiraError):
    """Raised when the environment or a configuration file holds a missing, contradictory or unknown value."""


class StoreError(MadeiraError):
    """Base of the errors of the store (Postgres)."""


class StoreUnavailable(StoreError):
    """Raised when Postgres cannot be reached, or not in time; whether the statement took effect is unknown."""


class BrokerUnavailable(MadeiraError):
    """Raised when Redis cannot be reached, or not in time; whether the script ran is unknown."""


class IllegalTransition(MadeiraError):
    """Raised when an action is asked for that the state of an event or a delivery does not allow.

    `code` is the stable name of the reason, by which programs tell one refusal from another.
    """

    def __init__(self, message: str, *, code: str = "already-finished") -> None:
        super().__init__(message)
        self.code = code


class NotThere(MadeiraError):
    """Raised when what an action names is not there."""


class AlreadyThere(MadeiraError):
    """Raised when something is made under a name that is taken."""


class Stale(MadeiraError):
    """Raised when a change was made to a version of an object that is not the present one any more: read it again."""


class InUse(MadeiraError):
    """Raised when something cannot be removed, since something else needs it; the message names what, and the remedy."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One thing that is wrong with one field of a configuration."""

    #: Its place in the document: ``retry.max``, ``secrets[1]``; in a file ``endpoint[ledger].retry.max``. Empty: the whole.
    field: str
    #: What is wrong, and what would be right; never the value of a secret.
    detail: str


class ConfigurationInvalid(MadeiraError):
    """Raised when sources, endpoints or routes are not as they must be; all `problems` at once."""

    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.detail}" if p.field else p.detail for p in problems))
        self.problems = problems


class SelectionInvalid(MadeiraError):
    """Raised when the filter of many deliveries is not as it must be; all `problems` at once."""

    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.detail}" if p.field else f"the filter {p.detail}" for p in problems))
        self.problems = problems
