"""What `madeira doctor` looks at on the disk: whether the folders that Madeira writes to can be made, written to, and have room.

Nothing is made or changed: of a folder that is not there yet, the nearest one above it that is there is looked at.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from madeira import settings
from madeira.cli.findings import Finding, Level
from madeira.settings import Settings

#: Room that should be, and must be, where an embedded server keeps its data: bytes.
_ROOM: Final = (2 * 2**30, 200 * 2**20)

#: The same where only the files of the metrics are, without which all else goes on.
_METRICS_ROOM: Final = (16 * 2**20, 0)

Usage = Callable[[Path], Any]


def look(values: Settings, *, is_up: bool, usage: Usage = shutil.disk_usage) -> Iterator[Finding]:
    """The data folder where `madeira up` uses it (`is_up`: one runs), and that of the metrics, which every process writes."""
    if is_up or not values.database_url or not values.redis_url:
        why = refusal(values.data_dir)
        if why:
            yield Finding("error", "data folder", f"{why}; `madeira up` keeps its data there: mend it, or set MADEIRA_DATA_DIR")
            return
        yield from _room(values.data_dir, _ROOM, "a full disk stops Postgres, and events are refused", "MADEIRA_DATA_DIR", usage)
    yield from _metrics(values, usage)


def _metrics(values: Settings, usage: Usage) -> Iterator[Finding]:
    folder, name = settings.metrics_root(values)
    why = refusal(folder)
    if why:
        # Whoever has named no folder may run the processes elsewhere.
        level: Level = "error" if settings.is_set(name) else "warning"
        text = f"{why}; a process that is started here ends with that, or tells none of its numbers: mend it, or set {name}"
        yield Finding(level, "metrics folder", text)
        return
    full = "what a process finds no room for is on no page of metrics"
    yield from (one for one in _room(folder, _METRICS_ROOM, full, name, usage) if one.level != "ok")


def refusal(folder: Path) -> str | None:
    """Why nothing can be written in `folder`, or it cannot be made; None when it can."""
    there = nearest(folder)
    if not there.is_dir():
        return f"{there} is not a folder" + (f", so {folder} cannot be made" if there != folder else "")
    # Of such a disk the kernel also says that nobody may write, whatever the rights.
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is on a disk that is mounted for reading only"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"this user may not write into {there}" + (f", so {folder} cannot be made" if there != folder else "")
    return None


def nearest(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next((one for one in (folder, *folder.parents) if os.path.lexists(one)), Path(folder.anchor))


def _room(folder: Path, room: tuple[int, int], full: str, name: str, usage: Usage) -> Iterator[Finding]:
    there = nearest(folder)
    free = usage(there).free
    good, bearable = room
    text = f"{free / 2**30:,.1f} GiB are free where {folder} is"
    if free >= good:
        yield Finding("ok", "disk", text)
        return
    yield Finding("warning" if free >= bearable else "error", "disk", f"{text}; {full}: make room, or move {name}")
