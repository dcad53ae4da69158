"""The files in which processes of one family keep their numbers, read and added up for one page.

prometheus-client writes one file per process and kind of number. Three things it leaves to its user are done here. The
numbers of processes that are gone go into one file of sums, so that restarts neither lose a count nor fill the disk; each
such step can be cut off at any moment without a count being lost or counted twice. What a killed process left torn is put
aside, and the rest is told. And names that come from a configuration that changes for years are a bounded set: those that are
too many count under one common name.

A folder belongs to one family on one machine: a container whose processes have numbers of their own must not share it.
"""

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from operator import add
from pathlib import Path
from typing import Final

from prometheus_client import Metric, multiprocess
from prometheus_client.mmap_dict import MmapedDict

from madeira.log import get
from madeira.metrics_blocks import Reserved

#: Different values that a label of `NAMED` may have on one page; 2,000 endpoints make some 100,000 series.
NAMES_MAX: Final = 2000

#: Labels whose values come from the configuration.
NAMED: Final = ("endpoint", "source")

#: Stands for all names beyond `NAMES_MAX`; no endpoint can be called so.
OTHERS: Final = "(others)"

#: Stands for the process id in the names of the files that hold the sums of the dead.
_NOBODY: Final = "0"

#: Kinds of files whose numbers outlive their process, and how two of them become one.
_FOLDED: Final[Mapping[str, Callable[[float, float], float]]] = {"counter": add, "histogram": add, "gauge_max": max}

#: Files that go into the sums in one step; their numbers are part of a file's name.
_AT_ONCE: Final = 20

#: Seconds that a file without numbers may be younger than: its process may be about to begin with it.
_FRESH_S: Final = 60.0

#: Seconds that a page waits for another one; longer only if the other's process stands still.
_PATIENCE_S: Final = 1.0

log = get(__name__)


def families(folder: Path) -> list[Metric]:
    """The numbers of all processes that write, or wrote, into `folder`.

    Raises nothing because of a file or the folder: what can be read is told, what cannot is logged.
    """
    try:
        with _alone(folder) as alone:
            if alone:
                _fold_the_dead(folder)
            return _merged(folder)
    except OSError as e:
        log.warning("metrics.folder_unusable", folder=str(folder), error=str(e))
        return _merged(folder)


def clear(folder: Path) -> None:
    """Forget the numbers of earlier processes; only while none of the family runs.

    Raises nothing: where they cannot be removed they are told on, and the log says so.
    """
    try:
        for file in folder.glob("*.db*"):
            file.unlink(missing_ok=True)
    except OSError as e:
        log.warning("metrics.folder_unusable", folder=str(folder), error=str(e))


class Names:
    """Keeps the values of a label few: the first `limit` names stand for themselves, all others for `OTHERS`."""

    def __init__(self, *, limit: int = NAMES_MAX) -> None:
        self._names: set[str] = set()
        self._limit = limit

    def __call__(self, name: str) -> str:
        """The value of the label for `name`."""
        if name in self._names:
            return name
        if len(self._names) >= self._limit:
            return OTHERS
        self._names.add(name)
        return name


def _merged(folder: Path) -> list[Metric]:
    files = [str(f) for f in folder.glob("*.db")]
    try:
        return _merge(files)
    except Exception:  # noqa: BLE001  # a torn file raises whatever its bytes lead to
        return _merge([f for f in files if _is_readable(f)])


def _merge(files: list[str]) -> list[Metric]:
    return list(multiprocess.MultiProcessCollector.merge(files, accumulate=True))  # type: ignore[no-untyped-call]


def _is_readable(file: str) -> bool:
    try:
        _merge([file])
    except FileNotFoundError:
        return False
    except Exception as e:  # noqa: BLE001  # as above
        log.warning("metrics.file_unreadable", file=file, error=repr(e))
        return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """One page at a time, since only one may move numbers; False when another one stands still in the midst of it."""
    with (folder / "page.lock").open("w") as lock:
        yield _locked(lock.fileno())


def _locked(lock: int) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)


# -- what becomes of the dead ---------------------------------------------------------------------------------------------


def _fold_the_dead(folder: Path) -> None:
    """Add the numbers of processes that are gone to the sums, else restarts would fill the disk and slow each page down.

    Gauges just go, since they tell of processes that are there; but those of the latest of all (`max`) tell what once was.
    """
    _end_what_was_cut_off(folder)
    dead: dict[str, list[Path]] = {}
    for file in folder.glob("*.db"):
        kind, _, pid = file.stem.rpartition("_")
        if pid == _NOBODY or not pid.isdigit() or _is_in_use(file, pid):
            continue
        if kind in _FOLDED:
            dead.setdefault(kind, []).append(file)
        else:
            file.unlink(missing_ok=True)
    for kind, files in dead.items():
        for start in range(0, len(files), _AT_ONCE):
            _fold(folder, kind, files[start : start + _AT_ONCE])


def _is_in_use(file: Path, pid: str) -> bool:
    """Whether process `pid` writes into `file`; another process may have got the number of a dead one."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        # Somebody else's process, whose maps are not ours to see: rather too many files than a lost count.
        return True
    return f"/{file.parent.name}/{file.name}" in mapped or _may_be_beginning(file)


def _may_be_beginning(file: Path) -> bool:
    try:
        with file.open("rb") as f:
            empty = not any(f.read(8))
        return empty and time.time() - file.stat().st_mtime < _FRESH_S
    except FileNotFoundError:
        return True


def _fold(folder: Path, kind: str, files: list[Path]) -> None:
    """Move the numbers of `files` to the sums of their kind.

    The new sums are complete before the first file goes, and take the place of the old ones after the last one went. So
    `_end_what_was_cut_off` can tell from what is there how far it came.
    """
    found = {file: numbers for file in files if (numbers := _numbers_of(file)) is not None}
    if not found:
        return
    sums = folder / f"{kind}_{_NOBODY}.db"
    total = (_numbers_of(sums) if sums.exists() else None) or {}
    names = {label: Names(limit=NAMES_MAX) for label in NAMED}
    for key in total:
        _few(key, names)
    for numbers in found.values():
        for key, value in numbers.items():
            few = _few(key, names)
            total[few] = _FOLDED[kind](total.get(few, 0.0), value)
    pids = "-".join(file.stem.rpartition("_")[2] for file in found)
    new = folder / f"{sums.name}.{pids}"
    try:
        _write(new, total)
    except OSError:
        # No room beside the old sums: half of the new ones only take what there is.
        new.unlink(missing_ok=True)
        raise
    for file in found:
        file.unlink(missing_ok=True)
    new.replace(sums)


def _end_what_was_cut_off(folder: Path) -> None:
    """Sums that a killed process has left beside those that count: they are complete if a file went that is in them."""
    for new in folder.glob(f"*_{_NOBODY}.db.*"):
        sums, _, pids = new.name.rpartition(".")
        kind = sums.removesuffix(f"_{_NOBODY}.db")
        files = [folder / f"{kind}_{pid}.db" for pid in pids.split("-")]
        if all(file.exists() for file in files):
            new.unlink()
            continue
        for file in files:
            file.unlink(missing_ok=True)
        new.replace(folder / sums)


def _few(key: str, names: Mapping[str, Names]) -> str:
    """The key under which the numbers of `key` are kept, with names that are too many as one."""
    metric, name, labels, text = json.loads(key)
    for label, few in names.items():
        if label in labels:
            labels[label] = few(labels[label])
    return json.dumps([metric, name, labels, text], sort_keys=True)


def _numbers_of(file: Path) -> dict[str, float] | None:
    """The numbers of a file that no process writes any more; None when it is torn, and then it is put aside."""
    try:
        found = MmapedDict.read_all_values_from_file(str(file))  # type: ignore[no-untyped-call]
        numbers = {key: value for key, value, _, _ in found}
        for key in numbers:
            _few(key, {})
    except FileNotFoundError:
        return None
    except Exception as e:  # noqa: BLE001  # a torn file raises whatever its bytes lead to
        log.warning("metrics.file_unreadable", file=str(file), error=repr(e))
        file.unlink(missing_ok=True)
        return None
    return numbers


def _write(file: Path, numbers: Mapping[str, float]) -> None:
    file.unlink(missing_ok=True)
    with closing(Reserved(str(file))) as new:
        for key, value in numbers.items():
            new.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
