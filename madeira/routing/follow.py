"""The rules as they are now: a configuration file, followed while the process runs.

The file is read every second, not watched: it may lie on any file system, be replaced by renaming, or be a mounted secret.
A file with a mistake changes nothing: the old rules stay and the mistake is logged, once. A file is taken only when two
looks, a moment apart, see the same: an editor that empties it before it writes must not take all rules away in between. A
file that has lost all its sources counts as a mistake too: a full disk leaves an empty one.

A worker must be able to start again while the file holds a mistake, or a mistake would end the deliveries that it had no
part in. So whoever names a place for it keeps a copy of the last file that was accepted.
"""

import contextlib
import os
import tempfile
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
    thread, after each change (not for the first ones). `last_good` is where a copy of the last accepted file is kept,
    readable for its owner only; the copy holds where the file is missing or wrong at the start.

    Raises:
        SettingsError: on construction, when the file is missing or wrong, and there is no copy.
    """

    def __init__(
        self, *, path: Path | None, on_change: Callable[[Rules], None] | None = None, last_good: Path | None = None
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._last_good = last_good
        self._seen: bytes | OSError = b"" if path is None else _read(path)
        self._version = _time_of_change(path)
        self._current = no_rules() if path is None else self._first(path)
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

    def _first(self, path: Path) -> Rules:
        before = self._load_copy()
        try:
            rules = _load(path, self._seen, before)
        except SettingsError as e:
            if before is None:
                raise
            remedy = f"the rules from before still hold; correct the file, or remove {self._last_good} to do without them"
            log.error("rules.refused", error=str(e), remedy=remedy)
            self._version = _time_of_change(self._last_good)
            return before
        self._keep(self._seen)
        return rules

    def _load_copy(self) -> Rules | None:
        if self._last_good is None:
            return None
        try:
            return _load(self._last_good, _read(self._last_good), None)
        except SettingsError:
            # There is none yet, or it names variables that are no longer set: then the file alone counts.
            return None

    def _keep(self, content: bytes | OSError) -> None:
        if self._last_good is None or isinstance(content, OSError) or _read(self._last_good) == content:
            return
        try:
            _write_privately(self._last_good, content)
        except OSError as e:
            log.warning("rules.not_kept", error=str(e), remedy="a worker cannot start again while the file holds a mistake")

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            if self._stopped:
                return
            try:
                self._look()
            except Exception:
                # Whatever it was: this thread is the only one that brings the rules up to date.
                log.exception("rules.look_failed")

    def _look(self) -> None:
        assert self._path is not None
        content = self._settled(self._path)
        if content is None:
            return
        try:
            self._current = _load(self._path, content, self._current)
        except SettingsError as e:
            log.error("rules.refused", error=str(e), remedy="the rules from before still hold")
            return
        self._version = _time_of_change(self._path)
        rules = self._current
        log.info("rules.changed", sources=len(rules.sources), endpoints=len(rules.endpoints), routes=len(rules.routes))
        self._keep(content)
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


def _load(path: Path, content: bytes | OSError, before: Rules | None) -> Rules:
    """The rules of a file's content; `before` are those that hold until now, if any."""
    if isinstance(content, OSError):
        raise SettingsError(f"{path}: cannot be read: {content.strerror}")
    try:
        rules = parse_toml(content.decode(), where=str(path))
    except SettingsError:
        raise
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8") from None
    except Exception as e:  # noqa: BLE001  # whatever the parser has not foreseen is a mistake in the file
        # Only its kind is told: the message could hold a secret of the file.
        raise SettingsError(f"{path}: cannot be used: {type(e).__name__}") from None
    if before is not None and before.sources and not rules.sources:
        raise SettingsError(f"{path}: holds no source, where there were {len(before.sources)} before")
    return rules


def _write_privately(path: Path, content: bytes) -> None:
    """Replace `path` as a whole; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made with mode 0600.
    descriptor, fresh = tempfile.mkstemp(prefix=path.stem, suffix=".new", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


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
