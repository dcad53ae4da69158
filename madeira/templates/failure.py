"""The one error of templates."""

from madeira.errors import MadeiraError


class TemplateFailed(MadeiraError):
    """Raised when a template makes nothing of an event that could be sent; `reason` is one line without any value of it."""

    def __init__(self, reason: str) -> None:
        # A name out of the template may hold what neither a log line nor Postgres takes.
        reason = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in reason)
        super().__init__(reason)
        self.reason = reason
