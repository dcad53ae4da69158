"""The rules as they are now: a configuration file, followed while the process runs.

The file is read every second, not watched: it may lie on any file system, be replaced by renaming, or be a mounted secret.
A file with a mistake changes nothing: the old rules stay and the mistake is logged, once. A file is taken only when two
looks, a moment apart, see the same: an editor that empties it before it writes must not take all rules away in between.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from madeira.errors import SettingsError
from madeira.log import get
from madeira.routing.config import Rules, no_rules, parse_toml

#: Seconds between two looks at the file; a change counts within 2 s.
_PERIOD_S: Final = 1.0

#: Seconds that a changed file must stay the same before it is taken.
_SETTLE_S: Final = 0.1

log = get(__name__)


class RulesFollower:
    """Holds the current rules; a thread of its own brings them up to date.

    `path` is the file, or None for the built-in rules only. `on_change` is called with the new rules, in the follower's
    thread, after each change (not for the first ones).

    Raises:
        SettingsError: on construction, when the file is missing or wrong.
    """

    def __init__(self, *, path: Path | None, on_change: Callable[[Rules], None] | None = None) -> None:
        self._path = path
        self._on_change = on_change
        self._seen: bytes | OSError = b"" if path is None else _read(path)
        self._version = _time_of_change(path)
        self._current = no_rules() if path is None else self._load(self._seen)
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> Rules:
        """The rules that hold now."""
        return self._current

    @property
    def version(self) -> int:
        """Rises with every change, and is the same in every process that reads the file: its time of change in ms."""
        return self._version

    def start(self) -> None:
        """Begin to follow; after a fork, since threads do not survive one."""
        if self._path is None or self._thread is not None:
            return
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rules-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End following; `current` stays as it is."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reload(self) -> None:
        """Look at the file now. Returns at once; may be called from a signal handler."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            if not self._stopped:
                self._look()

    def _look(self) -> None:
        assert self._path is not None
        content = self._settled(self._path)
        if content is None:
            return
        try:
            self._current = self._load(content)
        except SettingsError as e:
            log.error("rules.refused", error=str(e), remedy="the rules from before still hold")
            return
        self._version = _time_of_change(self._path)
        rules = self._current
        log.info("rules.changed", sources=len(rules.sources), endpoints=len(rules.endpoints), routes=len(rules.routes))
        self._tell(rules)

    def _settled(self, path: Path) -> bytes | OSError | None:
        """What the file holds, once it stays the same; None when that is what was seen last."""
        content = _read(path)
        while not _same(content, self._seen):
            time.sleep(_SETTLE_S)
            again = _read(path)
            if _same(again, content):
                self._seen = content
                return content
            content = again
        return None

    def _tell(self, rules: Rules) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(rules)
        except Exception:
            log.exception("rules.change_not_told")

    def _load(self, content: bytes | OSError) -> Rules:
        if isinstance(content, OSError):
            raise SettingsError(f"{self._path}: cannot be read: {content.strerror}")
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise SettingsError(f"{self._path}: is not UTF-8") from None
        return parse_toml(text, where=str(self._path))


def _read(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as e:
        return e


def _time_of_change(path: Path | None) -> int:
    """The inode's time, which nobody can set back: a restored older file is newer by it."""
    try:
        return path.stat().st_ctime_ns // 1_000_000 if path else 0
    except OSError:
        return 0


def _same(one: bytes | OSError, other: bytes | OSError) -> bool:
    if isinstance(one, OSError) and isinstance(other, OSError):
        return one.errno == other.errno
    return one == other
