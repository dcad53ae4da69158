"""The numbers of processes that come, go, die in the midst of something, and whose ids come again."""

import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict

from madeira import metrics_files
from madeira.metrics_files import OTHERS, Names, families

#: Above the highest id that a process can have.
GONE = itertools.count(5_000_000)


def key(endpoint: str) -> str:
    """How a file names the dead letters of an endpoint."""
    labels = {"endpoint": endpoint, "failure_class": "receiver"}
    return json.dumps(["madeira_dead_letters", "madeira_dead_letters_total", labels, "Dead."], sort_keys=True)


def begin(folder: Path, kind: str, pid: int, **counts: float) -> MmapedDict:
    """The open file of a process that has counted this much, by endpoint."""
    numbers = MmapedDict(str(folder / f"{kind}_{pid}.db"))
    for endpoint, count in counts.items():
        numbers.write_value(key(endpoint), count, 0.0)
    return numbers


def left(folder: Path, kind: str = "counter", pid: int | None = None, **counts: float) -> Path:
    """The file of a process that is gone."""
    pid = next(GONE) if pid is None else pid
    begin(folder, kind, pid, **counts).close()
    return folder / f"{kind}_{pid}.db"


def told(folder: Path) -> dict[str, float]:
    """What the page says, by endpoint."""
    return {s.labels["endpoint"]: s.value for family in families(folder) for s in family.samples}


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Lets this very process count."""
    opened: list[Any] = []
    yield lambda kind="counter", **counts: opened.append(begin(tmp_path, kind, os.getpid(), **counts))
    for numbers in opened:
        numbers.close()


def test_counts_of_the_dead_stay_and_their_files_go(tmp_path: Path, alive: Callable[..., None]) -> None:
    """However many there were, what is left is one file of sums; the living go on in their own."""
    alive(a=5)
    for _ in range(50):
        left(tmp_path, a=1, b=2)
    for _ in range(3):
        assert told(tmp_path) == {"a": 55, "b": 100}
    assert sorted(f.name for f in tmp_path.glob("*.db*")) == ["counter_0.db", f"counter_{os.getpid()}.db"]


def test_gauges_of_the_dead_go(tmp_path: Path, alive: Callable[..., None]) -> None:
    """What a process had open is not open any more; what the living have is told."""
    left(tmp_path, "gauge_livesum", a=7)
    alive("gauge_livesum", a=2)
    assert told(tmp_path) == {"a": 2}
    assert len(list(tmp_path.glob("*.db"))) == 1


def test_the_latest_of_all_stays(tmp_path: Path, alive: Callable[..., None]) -> None:
    """When something last came to its end is no state of the process that did it."""
    left(tmp_path, "gauge_max", a=7)
    left(tmp_path, "gauge_max", a=5, b=3)
    alive("gauge_max", a=6)
    for _ in range(2):
        assert told(tmp_path) == {"a": 7, "b": 3}


def test_a_number_that_another_process_has_now_belongs_to_the_dead(tmp_path: Path) -> None:
    """An id came again: who has it now does not write into the file, so its gauges go and its counts are summed."""
    left(tmp_path, "gauge_livesum", os.getpid(), a=7)
    left(tmp_path, "counter", os.getpid(), a=3)
    assert told(tmp_path) == {"a": 3}
    assert [f.name for f in tmp_path.glob("*.db")] == ["counter_0.db"]


def test_a_file_that_its_process_is_about_to_begin_is_left_alone(tmp_path: Path) -> None:
    """Taken away under its hands, it would be counted in for nobody; one that stays empty goes in the end."""
    file = tmp_path / f"counter_{os.getpid()}.db"
    file.write_bytes(bytes(1 << 16))
    told(tmp_path)
    assert file.exists()
    os.utime(file, (time.time() - 3600,) * 2)
    told(tmp_path)
    assert not file.exists()


@pytest.mark.parametrize("step", range(5))
def test_a_page_that_is_killed_at_any_step_neither_loses_a_count_nor_doubles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The next page ends what was cut off, or begins it anew."""
    left(tmp_path, a=10)
    told(tmp_path)
    for _ in range(3):
        left(tmp_path, a=1, b=1)
    steps = itertools.count()

    def killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def step_of(self: Path, *args: Any, **options: Any) -> Any:
            if next(steps) == step:
                raise KeyboardInterrupt
            return real(self, *args, **options)

        return step_of

    with monkeypatch.context() as patched:
        # One before the sums are written, one for each of three files, one for the sums' place.
        patched.setattr(Path, "unlink", killed(Path.unlink))
        patched.setattr(Path, "replace", killed(Path.replace))
        with pytest.raises(KeyboardInterrupt):
            told(tmp_path)
    for _ in range(2):
        assert told(tmp_path) == {"a": 13, "b": 3}
    assert [f.name for f in tmp_path.glob("*.db*")] == ["counter_0.db"]


def test_sums_that_were_half_written_do_not_count(tmp_path: Path) -> None:
    """What a process was writing when it was killed is written anew from the files that are all still there."""
    file = left(tmp_path, a=1)
    half = tmp_path / f"counter_0.db.{file.stem.rpartition('_')[2]}"
    half.write_bytes(b"\x40\x00")
    assert told(tmp_path) == {"a": 1}
    assert not half.exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x40\x00\x00\x00\x00\x00\x00\x00garbage" + b"{" * 100])
@pytest.mark.parametrize("pid", [0, 5_999_999, os.getppid()], ids=["sums", "dead", "alive"])
def test_a_torn_file_is_put_aside_and_the_rest_is_told(tmp_path: Path, pid: int, content: bytes) -> None:
    """Whoever's it is; once, so that the log is not full of it."""
    torn = tmp_path / f"counter_{pid}.db"
    torn.write_bytes(content)
    os.utime(torn, (time.time() - 3600,) * 2)
    left(tmp_path, a=4)
    for _ in range(2):
        assert told(tmp_path) == {"a": 4}
    assert [f.name for f in tmp_path.glob("*.db")] == ["counter_0.db"]


def test_names_that_are_too_many_count_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints that came and went for years do not make the page longer and longer; the sum over all stays."""
    monkeypatch.setattr(metrics_files, "NAMES_MAX", 3)
    for n in range(10):
        left(tmp_path, **{f"e{n}": 1.0})
        page = told(tmp_path)
        assert sum(page.values()) == n + 1
        assert len(page) <= 4
    assert page[OTHERS] == 7


def test_a_process_keeps_to_the_names_that_it_met_first() -> None:
    """A name that has a series keeps it."""
    names = Names(limit=2)
    assert [names(n) for n in ("a", "b", "c", "a", "c")] == ["a", "b", OTHERS, "a", OTHERS]


def test_a_page_that_stands_still_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another one has the lock the numbers are told, and nothing is moved."""
    monkeypatch.setattr(metrics_files, "_PATIENCE_S", 0.02)
    file = left(tmp_path, a=1)
    with (tmp_path / "page.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert told(tmp_path) == {"a": 1}
        assert file.exists()
    assert told(tmp_path) == {"a": 1}
    assert not file.exists()


def test_without_its_folder_the_page_is_empty(tmp_path: Path) -> None:
    """Somebody tidied up too much; nobody is told an error instead of numbers."""
    assert told(tmp_path / "gone") == {}
