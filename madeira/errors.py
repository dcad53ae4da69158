"""Every error that Madeira raises on purpose, in one tree.

A message names the value that is wrong and what to do about it: whoever reads it is on call.
"""


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


class UnknownEndpoint(MadeiraError):
    """Raised when a delivery names an endpoint that the configuration does not (or no longer) hold."""


class IllegalTransition(MadeiraError):
    """Raised when an action is asked for that the state of an event or a delivery does not allow."""


class NotThere(MadeiraError):
    """Raised when what an action names is not there."""


class AlreadyThere(MadeiraError):
    """Raised when something is made under a name that is taken."""
