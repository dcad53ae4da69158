"""The one error of templates."""

from madeira.errors import MadeiraError


class TemplateFailed(MadeiraError):
    """Raised when a template makes nothing of an event that could be sent; `reason` is one line without any value of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
