"""The HTTP door: intake, what may be asked about events, and what machines ask about the process."""

from madeira.api.app import app

__all__ = ["app"]
