"""Traces for OpenTelemetry: one over the post of an event, its routing, and each attempt, whichever processes these are in.

What follows an event hours later knows its trace from the event's own row: intake writes the span of the post into the column
``traceparent``, and with it whether the trace is recorded at all. So nothing is kept beside the row, and restarts, a wiped Redis
and replays change nothing.

The libraries are an extra, and this module does not import them: without the setting none of them is loaded, and whoever would
record a span asks one `if`. In `record` stands what spans there are, in `export` how they leave the process.
"""

from typing import TYPE_CHECKING

from madeira.errors import SettingsError
from madeira.settings import Settings

if TYPE_CHECKING:
    from madeira.spans.record import Spans


def load(settings: Settings) -> None:
    """Load the libraries where they are wanted; before processes are forked, so that these share them.

    Raises:
        SettingsError: they are not installed.
    """
    if settings.traces == "off":
        return
    try:
        from madeira.spans import export  # noqa: F401
    except ModuleNotFoundError as e:
        raise SettingsError(
            f"MADEIRA_TRACES={settings.traces} needs what `pip install '.[otel]'` installs: there is no module {e.name}"
        ) from None


def start(settings: Settings, process: str) -> "Spans | None":
    """What records the spans of this process, which is of the kind `process` (``api``, ``worker``); None where it is off.

    Starts a thread: call it in the process itself, after the fork.

    Raises:
        SettingsError: the libraries are not installed, or a variable of OpenTelemetry is malformed.
    """
    if settings.traces == "off":
        return None
    load(settings)
    from madeira.spans import export

    return export.start(process)


def refusal(settings: Settings, *, timeout_s: float) -> str | None:
    """Why the collector takes nothing, asked with a request that holds no span; None when it does, or where spans are off.

    Raises:
        SettingsError: the libraries are not installed, or a variable of OpenTelemetry is malformed.
    """
    if settings.traces == "off":
        return None
    load(settings)
    from madeira.spans import export

    return export.refusal(timeout_s)
