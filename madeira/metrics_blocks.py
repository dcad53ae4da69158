"""The file in which a process keeps its numbers, made so that a full disk costs numbers and never the process.

prometheus-client maps sparse files: whoever writes where the disk has no room left is killed by SIGBUS, without a word. Here a
file has real blocks before anything is written to it, also whenever it grows. What finds no room, or may not be written, is
kept in memory instead: no page tells it, one line of the log says so, each page how many processes do it, and all else goes on. A
process that is started anew tries the folder again.
"""

import errno
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import prometheus_client.values
from prometheus_client.mmap_dict import MmapedDict

from madeira.log import get

#: Bytes that a file begins with; it grows by multiples of them.
STEP: Final = 1 << 16

#: A file grows by one part in so many: what doubles takes up to twice the room that it needs.
_GROWTH: Final = 4

#: Bytes of a file before its first number; how many of the file are used is told in the first four.
_HEAD: Final = 8

#: Bytes of a value and its time.
_VALUE: Final = 16

#: Bytes of a number beside its key, at most: the key's length, padding, and those.
_BESIDE_KEY: Final = 4 + 8 + _VALUE

#: How the name begins of an empty file by which a process says that it keeps numbers in memory.
_NOTE: Final = "in_memory_"

#: Which of the words behind a program's name in ``/proc/PID/stat`` says when the process was started.
_STARTED: Final = 19

_USED: Final = struct.Struct("i")

log = get(__name__)

#: The process that keeps numbers in memory: this one, or one that it was forked from.
_short = 0

#: Whether this process, or the one that it was forked from, has said that it keeps numbers in memory.
_has_told = False


def install() -> None:
    """Have prometheus-client use `Numbers` for whatever metric is made from now on."""
    prometheus_client.values.MmapedDict = Numbers  # type: ignore[attr-defined, assignment]


def in_memory(folder: Path) -> int:
    """How many processes keep numbers in memory that belong into `folder`.

    Such a process leaves a note there, which needs no block; where not even that can be made, only its own page tells of it.
    """
    found = {os.getpid()} & {_short}
    for note in folder.glob(f"{_NOTE}*"):
        pid = note.name.removeprefix(_NOTE).partition("_")[0]
        with suppress(OSError):
            if pid.isdigit() and note == _note(folder, int(pid)):
                found.add(int(pid))
            else:
                note.unlink()
    return len(found)


def _note(folder: Path, pid: int | None = None) -> Path:
    """The note of a process; with its start, since another one may get its number."""
    pid = pid or os.getpid()
    try:
        since = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_STARTED]
    except OSError:
        since = "gone"
    return folder / f"{_NOTE}{pid}_{since}"


class Reserved(MmapedDict):
    """A file of numbers whose blocks exist before they are written; one that its former owner left torn is begun anew.

    Raises OSError when there is no room for it, and from `write_value` when there is none for one more key: those that it has
    are safe.
    """

    def __init__(self, filename: str) -> None:
        self._fname = filename
        self._f: Any = None
        self._m: Any = None
        self._capacity = self._used = 0
        self._positions: dict[str, int] = {}
        Path(filename).parent.mkdir(parents=True, exist_ok=True)
        # Not opened for appending, as prometheus-client does: libc reserves where a file system cannot, by writing zeros there.
        self._f = os.fdopen(os.open(filename, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
        size = os.fstat(self._f.fileno()).st_size
        try:
            self._reserve(max(size, STEP))
        except OSError:
            self.close()
            if not size:
                _remove(filename)
            raise
        self._find_numbers()

    def close(self) -> None:
        """Let go of the file."""
        if self._m is not None:
            self._m.close()
        if self._f is not None:
            self._f.close()
        self._m = self._f = None

    def _reserve(self, capacity: int) -> None:
        """Map the file with `capacity` bytes, all of which the disk has."""
        descriptor = self._f.fileno()
        size = os.fstat(descriptor).st_size
        try:
            os.posix_fallocate(descriptor, 0, capacity)
            self._m = mmap.mmap(descriptor, capacity)
        except OSError:
            # What it got is room that somebody else may need.
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
        self._capacity = capacity

    def _find_numbers(self) -> None:
        [self._used] = _USED.unpack_from(self._m)
        try:
            found = list(self._read_all_values()) if self._used else []  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001  # a torn file raises whatever its bytes lead to
            found = []
        if not found or found[-1][-1] + _VALUE != self._used:
            found = []
            self._used = _HEAD
            _USED.pack_into(self._m, 0, _HEAD)
        self._positions = {key: position for key, _, _, position in found}

    def _init_value(self, key: str) -> None:
        needed = self._used + len(key.encode()) + _BESIDE_KEY
        if needed > self._capacity:
            wanted = max(needed, self._capacity + self._capacity // _GROWTH)
            self._reserve(-(-wanted // STEP) * STEP)
        super()._init_value(key)  # type: ignore[no-untyped-call]


class Numbers(Reserved):
    """The numbers of one kind of this process: in its file while there is room, and in memory what comes later."""

    def __init__(self, filename: str) -> None:
        self._kept: dict[str, tuple[float, float]] = {}
        self._takes_more = True
        try:
            super().__init__(filename)
        except OSError as e:
            self._take_no_more(e)

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and time of a key; 0 both, at first."""
        if key in self._positions or self._takes(key):
            value, timestamp = super().read_value(key)  # type: ignore[no-untyped-call]
            return value, timestamp
        return self._kept.setdefault(key, (0.0, 0.0))

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set value and time of a key."""
        if key in self._positions or self._takes(key):
            super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]
        else:
            self._kept[key] = (value, timestamp)

    def _takes(self, key: str) -> bool:
        """Whether the file takes one more key."""
        if self._takes_more:
            try:
                self._init_value(key)
            except OSError as e:
                self._take_no_more(e)
        return self._takes_more

    def _take_no_more(self, error: OSError) -> None:
        """From now on keep in memory what is new; a second try might find room for one kind of number and not for another."""
        global _has_told, _short
        self._takes_more = False
        _short = os.getpid()
        with suppress(OSError):
            _note(Path(self._fname).parent).touch()
        if _has_told:
            return
        _has_told = True
        log.warning(
            "metrics.kept_in_memory",
            folder=str(Path(self._fname).parent),
            reason=error.strerror,
            errno=errno.errorcode.get(error.errno or 0),
            remedy="make room there, or let this user write there; /metrics lacks these numbers till the process is started anew",
        )


def _remove(filename: str) -> None:
    """A file without anything in it would be a torn one to each page."""
    with suppress(OSError):
        os.unlink(filename)
