"""What a running `madeira up` leaves in its data folder: a lock, and a note that says where its parts are.

The lock is the kernel's, held by an open file: it is free again the moment `up` is gone, however it went. The note serves
the other commands, which find the embedded servers by it, and the next `up`, which ends what the last one could not.
"""

import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Final

from madeira.errors import MadeiraError, SettingsError
from madeira.sealing import Sealer, SealError, generate

#: Seconds that processes of an `up` that was killed get to end by themselves (its death told them to).
_PATIENCE_S: Final = 20.0

#: A word of which one is in the command line of everything that `up` starts.
_OURS: Final = ("madeira", "dramatiq", "periodiq")


class AlreadyRunning(MadeiraError):
    """Raised when another `madeira up` uses the same data folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a running `up` tells."""

    pid: int
    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    api_url: str
    config: str | None = None
    #: Sessions (by their leaders' process ids) that it has started and that have not ended in order.
    sessions: Sequence[int] = ()
    #: Where its parts may call, and may not: what a command calls for somebody is meant to be what they would.
    egress_allow: Sequence[str] = ()
    egress_deny: Sequence[str] = ()


class DataFolder:
    """The data folder, held by one `up` at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note = path / "up.json"
        self._lock_file = path / "up.lock"
        self._key_file = path / "secret.key"
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Take the folder for this process.

        Raises:
            AlreadyRunning: another `up` has it.
            SettingsError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._lock_file.open("a+")
        except OSError as e:
            raise SettingsError(f"MADEIRA_DATA_DIR: the folder {self.path} cannot be used: {e.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise AlreadyRunning(
                f"another `madeira up` (process {holder}) uses {self.path}; stop it, or set MADEIRA_DATA_DIR to another folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def unlock(self) -> None:
        """Give the folder back; the note goes, since nothing runs any more."""
        self._note.unlink(missing_ok=True)
        if self._lock:
            self._lock.close()
            self._lock = None

    def write(self, note: Note) -> None:
        """Replace the note; readable for its owner only, since the URLs hold passwords."""
        fresh = self._note.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as f:
            json.dump(asdict(note), f)
        fresh.rename(self._note)

    def read(self) -> Note | None:
        """The note of whoever runs, or of the last one that did not end in order."""
        try:
            values: Mapping[str, Any] = json.loads(self._note.read_text())
            known: dict[str, Any] = {f.name: values[f.name] for f in fields(Note) if f.name in values}
            return Note(**known | {name: tuple(known.get(name, ())) for name in ("sessions", "egress_allow", "egress_deny")})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def running(self) -> Note | None:
        """The note, if its `up` runs."""
        note = self.read()
        return note if note and self._is_locked() else None

    def secret_key(self) -> tuple[str, ...]:
        """The key that an `up` with an embedded Postgres has made here; empty when there is none.

        Raises:
            SettingsError: it cannot be read, or is no key.
        """
        try:
            key = self._key_file.read_text().strip()
        except FileNotFoundError:
            return ()
        except (OSError, UnicodeDecodeError):
            raise SettingsError(f"the key in {self._key_file} cannot be read; set MADEIRA_SECRET_KEY") from None
        try:
            Sealer((key,))
        except SealError:
            raise SettingsError(f"{self._key_file} holds no key; put the right one back, or set MADEIRA_SECRET_KEY") from None
        return (key,)

    def make_secret_key(self) -> Path:
        """Make a key and keep it, readable for its owner only; where it is. Only while the lock is ours."""
        fresh = self._key_file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(generate() + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._key_file)
        return self._key_file

    def end_leftovers(self) -> int:
        """End what an `up` that was killed has left; returns the number of processes. Only while the lock is ours."""
        note = self.read()
        if note is None:
            return 0
        left = {pid for session in note.sessions for pid in members(session) if is_ours(pid)}
        end(left, patience_s=_PATIENCE_S)
        self._note.unlink(missing_ok=True)
        return len(left)

    def _is_locked(self) -> bool:
        try:
            with self._lock_file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return False


def members(session: int) -> set[int]:
    """The processes of a session, found by the number that its leader had (the leader itself may be gone)."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _session_of(int(folder.name)) == session:
            found.add(int(folder.name))
    return found


def is_ours(pid: int) -> bool:
    """Whether the process is one that `up` may have started: numbers are used again after a restart of the machine."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(word in line for word in _OURS)


def end(pids: set[int], *, patience_s: float) -> None:
    """SIGTERM to each of `pids`, SIGKILL to those that are still there after `patience_s` seconds; waits for their end."""
    tell(pids)
    deadline = time.monotonic() + patience_s
    killed = False
    while alive := {pid for pid in pids if _session_of(pid) is not None}:
        if time.monotonic() > deadline and not killed:
            _send(alive, signal.SIGKILL)
            killed = True
        time.sleep(0.05)


def tell(pids: set[int]) -> None:
    """SIGTERM to each of `pids`."""
    _send(pids, signal.SIGTERM)


def _send(pids: set[int], sig: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def _session_of(pid: int) -> int | None:
    """The session of a living process; None for one that is gone or only waits to be reaped."""
    try:
        state, _parent, _group, session = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(session)
