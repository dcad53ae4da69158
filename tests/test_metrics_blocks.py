"""The files of numbers where there is no room for them: a disk that is full, or becomes so, costs numbers and no process."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict
from structlog.testing import capture_logs

from madeira import metrics_blocks, settings
from madeira.metrics_blocks import STEP, Numbers, Reserved
from madeira.metrics_files import families
from madeira.settings import Settings
from tests.disks import fill, mounted

ROOT = Path(__file__).parents[1]

Disk = Callable[[str], Path]

#: Logs as processes do.
LOG = "from madeira import log, settings; log.configure(settings.Settings(log_format='json'), 'test')\n"

#: Fills the disk of the folder to its last byte.
FILL = "from tests.disks import fill; folder = settings.metrics_folder(); fill(folder)\n"

#: Counts what is known already, then so much that is new that every file must grow.
COUNT = """
from madeira import metrics
metrics.DEAD_LETTERS.labels('known', 'receiver').inc()
metrics.expect_endpoints([f'e{n:03}' for n in range(100)])
metrics.DEAD_LETTERS.labels('e099', 'receiver').inc()
metrics.DELIVERY_RETRIES.labels('e099').observe(1)
"""

PAGE = "from madeira import metrics; print(metrics.page().decode())\n"


def key(name: str) -> str:
    """As the files have it."""
    return json.dumps(["madeira_x", "madeira_x_total", {"endpoint": name}, "X."], sort_keys=True)


def run(folder: Path, code: str) -> tuple[str, list[dict[str, str]]]:
    """What a process printed that kept its numbers in `folder`, and its log; it must have come to its end."""
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    command = [sys.executable, "-c", LOG + code]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Mounts a small file system of its own, with options."""
    with ExitStack() as stack:
        yield lambda options: stack.enter_context(mounted(options))


def told_once(lines: Sequence[Mapping[str, Any]], folder: Path, code: int) -> None:
    """One line, about the folder, with the meaning of the error and a remedy."""
    [line] = lines
    level = line.get("level", line.get("log_level"))
    assert (line["event"], level, line["folder"]) == ("metrics.kept_in_memory", "warning", str(folder))
    assert (line["reason"], line["errno"]) == (os.strerror(code), errno.errorcode[code])
    assert "room" in line["remedy"]
    assert "anew" in line["remedy"]


def test_a_process_that_begins_on_a_full_disk_goes_on_without_its_files(disk: Disk) -> None:
    """It leaves nothing half made there, and with room again a process that is started anew takes the folder again."""
    folder = disk("size=256k")
    page, lines = run(folder, FILL + COUNT + PAGE)
    told_once(lines, folder, errno.ENOSPC)
    assert [line for line in page.splitlines() if line.startswith("madeira_")] == ["madeira_numbers_in_memory 1.0"]
    assert not list(folder.glob("*.db"))
    (folder / "filling").unlink()
    with closing(Numbers(str(folder / "counter_1.db"))) as numbers:
        numbers.write_value(key("known"), 1.0, 0.0)
    assert values(folder / "counter_1.db") == {"known": 1.0}


def test_a_disk_that_becomes_full_costs_what_is_new_and_nothing_that_is_known(disk: Disk) -> None:
    """Its blocks were there before; and the page is served by whoever is asked."""
    folder = disk("size=512k")
    known = "from madeira import metrics; metrics.DEAD_LETTERS.labels('known', 'receiver').inc()\n"
    page, lines = run(folder, known + FILL + COUNT + PAGE)
    told_once(lines, folder, errno.ENOSPC)
    assert 'madeira_dead_letters_total{endpoint="known",failure_class="receiver"} 2.0' in page
    assert 'endpoint="e099"' not in page
    label = {"endpoint": "known", "failure_class": "receiver"}
    assert [s.value for f in families(folder) for s in f.samples if s.labels == label] == [2.0]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_page_tells_of_a_process_that_keeps_numbers_in_memory_until_it_is_gone(disk: Disk, when: str) -> None:
    """Whoever serves it, also where that process has not one file; another one that gets its number is not taken for it."""
    folder = disk("size=512k")
    assert metrics_blocks.in_memory(folder) == 0
    begin = "from madeira import metrics; metrics.DEAD_LETTERS.labels('known', 'receiver').inc()\n" if when == "meanwhile" else ""
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    command = [sys.executable, "-c", f"{LOG}{begin}{FILL}{COUNT}print(flush=True); input()"]
    with subprocess.Popen(
        command, env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert metrics_blocks.in_memory(folder) == 1
        [note] = folder.glob("in_memory_*")
        process.kill()
    (folder / "filling").unlink()
    (folder / f"in_memory_{os.getpid()}_1").touch()
    assert metrics_blocks.in_memory(folder) == 0
    assert not list(folder.glob("in_memory_*")), note


def test_sums_that_find_no_room_are_made_when_there_is_some(disk: Disk) -> None:
    """Until then the files of the dead stay, and what they hold is told; nothing half made takes room besides."""
    folder = disk("size=256k")
    for pid in (5_999_998, 5_999_999):
        with closing(Reserved(str(folder / f"counter_{pid}.db"))) as numbers:
            numbers.write_value(key("a"), 2.0, 0.0)

    def seen() -> tuple[list[float], list[str]]:
        told = [s.value for family in families(folder) for s in family.samples]
        return told, sorted(file.name for file in folder.glob("*.db*"))

    with capture_logs() as lines:
        filling = fill(folder)
        assert seen() == ([4.0], ["counter_5999998.db", "counter_5999999.db"])
        filling.unlink()
        assert seen() == ([4.0], ["counter_0.db"])
    [line] = lines
    assert (line["event"], line["folder"]) == ("metrics.folder_unusable", str(folder))


@pytest.mark.parametrize(
    ("options", "name", "code"),
    [
        ("nr_inodes=1", "MADEIRA_DATA_DIR", errno.ENOSPC),
        ("ro", "MADEIRA_DATA_DIR", errno.EROFS),
        ("ro", "PROMETHEUS_MULTIPROC_DIR", errno.EROFS),
    ],
)
def test_a_disk_where_no_folder_can_be_made_stops_no_start(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, options: str, name: str, code: int
) -> None:
    """It may have become so since the last one: full, or, after an error, for reading only."""
    folder = disk(options)
    # What `multiproc_dir` sets is taken back only if it was something before.
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.setenv(name, str(folder))
    made = settings.multiproc_dir(Settings(data_dir=folder), "worker")
    with capture_logs() as lines, closing(Numbers(str(made / "counter_1.db"))) as numbers:
        numbers.write_value(key("a"), 2.0, 0.0)
        assert numbers.read_value(key("a")) == (2.0, 0.0)
    told_once(lines, made, code)


@pytest.mark.parametrize("limit", [STEP // 2, STEP])
def test_a_file_that_may_not_become_so_large_is_as_one_without_room(tmp_path: Path, limit: int) -> None:
    """Whoever is no root has this too: a limit of the process, met at the beginning or when a file grows."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    page, lines = run(tmp_path, code + COUNT + PAGE)
    told_once([line for line in lines if line["event"] != "metrics.folder_unusable"], tmp_path, errno.EFBIG)
    assert ('endpoint="known"' in page) == (limit == STEP)
    assert 'madeira_dead_letters_total{endpoint="e099"' not in page


# -- one file ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another test's process has said."""
    monkeypatch.setattr(metrics_blocks, "_has_told", False)
    monkeypatch.setattr(metrics_blocks, "_short", 0)


def values(file: Path) -> dict[str, float]:
    """What a page reads, by endpoint."""
    found = MmapedDict.read_all_values_from_file(str(file))
    return {json.loads(k)[2]["endpoint"]: value for k, value, _, _ in found}


def is_real(file: Path) -> bool:
    """Whether the disk has every byte of it."""
    found = file.stat()
    return found.st_blocks * 512 >= found.st_size > 0


def test_every_byte_of_a_file_is_on_the_disk_before_it_is_written(tmp_path: Path) -> None:
    """From the beginning, and whenever it grows; not twice what is needed."""
    file = tmp_path / "counter_1.db"
    numbers = Numbers(str(file))
    assert is_real(file)
    sizes = set()
    for n in range(5000):
        numbers.write_value(key(str(n)), float(n), 0.0)
        if file.stat().st_size not in sizes:
            sizes.add(file.stat().st_size)
            assert is_real(file)
    numbers.close()
    assert len(sizes) > 3
    assert all(size % STEP == 0 for size in sizes)
    assert values(file) == {str(n): float(n) for n in range(5000)}
    used = int.from_bytes(file.read_bytes()[:4], sys.byteorder)
    assert max(sizes) < used * 1.25 + STEP


def test_prometheus_client_uses_these_files(tmp_path: Path) -> None:
    """It is told so at a place of its own that another version may not have."""
    run(tmp_path, COUNT + "metrics.tell_pools({'pool_size': 1, 'pool_max': 1, 'requests_waiting': 0}, (1, 1))")
    files = [*tmp_path.glob("*.db")]
    assert {f.name.rpartition("_")[0] for f in files} == {"counter", "histogram", "gauge_livesum", "gauge_max"}
    assert all(is_real(f) for f in files)
    assert all(f.stat().st_size < 2 * STEP for f in files if f.name.startswith("gauge"))


def test_a_file_with_holes_is_filled_and_goes_on(tmp_path: Path) -> None:
    """As one that an earlier version left to a process of the same number."""
    file = tmp_path / "counter_1.db"
    old = MmapedDict(str(file))
    old.write_value(key("a"), 3.0, 0.0)
    old.close()
    assert not is_real(file)
    numbers = Numbers(str(file))
    assert is_real(file)
    assert numbers.read_value(key("a")) == (3.0, 0.0)
    numbers.write_value(key("b"), 1.0, 0.0)
    numbers.close()
    assert values(file) == {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x09",
        b"\x40\x00\x00\x00",
        b"\xff" * 64,
        b"\xff\xff\xff\x7f" + bytes(100),
        b"\x40\x00\x00\x00\x00\x00\x00\x00garbage" + b"{" * 100,
        b"\x10\x00\x00\x00\x00\x00\x00\x00" + bytes(100),
    ],
)
def test_a_torn_file_of_a_process_with_this_number_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    """Nobody dies of what somebody else left."""
    file = tmp_path / "counter_1.db"
    file.write_bytes(content)
    numbers = Numbers(str(file))
    for n in range(1000):
        numbers.write_value(key(str(n)), float(n), 0.0)
    numbers.close()
    assert values(file) == {str(n): float(n) for n in range(1000)}


def test_a_folder_that_was_removed_is_made_again_by_whoever_begins(tmp_path: Path) -> None:
    """Whoever has a file there goes on with it, though no page sees it any more."""
    folder = tmp_path / "metrics"
    first = Numbers(str(folder / "counter_1.db"))
    shutil.rmtree(folder)
    with capture_logs() as lines:
        for n in range(1000):
            first.write_value(key(str(n)), float(n), 0.0)
        assert first.read_value(key("999")) == (999.0, 0.0)
        second = Numbers(str(folder / "counter_2.db"))
        second.write_value(key("a"), 1.0, 0.0)
    assert not lines
    assert [s.value for family in families(folder) for s in family.samples] == [1.0]
    first.close()
    second.close()


def test_without_its_folder_a_process_counts_in_memory_and_says_so_once(tmp_path: Path) -> None:
    """However many kinds of numbers it has."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "metrics"
    with capture_logs() as lines:
        for kind in ("counter", "histogram"):
            numbers = Numbers(str(folder / f"{kind}_1.db"))
            assert numbers.read_value(key("a")) == (0.0, 0.0)
            numbers.write_value(key("a"), 2.0, 1.0)
            numbers.write_value(key("b"), 3.0, 0.0)
            assert (numbers.read_value(key("a")), numbers.read_value(key("b"))) == ((2.0, 1.0), (3.0, 0.0))
            numbers.close()
            numbers.close()
    [line] = lines
    assert (line["event"], line["errno"]) == ("metrics.kept_in_memory", "ENOTDIR")


def test_sums_are_never_kept_in_memory(tmp_path: Path) -> None:
    """Whoever makes them must know that they are not there, before he removes what is in them."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Reserved(str(tmp_path / "file" / "metrics" / "counter_0.db"))


def test_a_file_that_was_cut_off_anywhere_spoils_no_page(tmp_path: Path) -> None:
    """What is left of it may be told or not, and the others are."""
    whole = tmp_path / "whole.db"
    with_holes = Reserved(str(whole))
    for n in range(5):
        with_holes.write_value(key(str(n)), 1.0, 0.0)
    with_holes.close()
    content = whole.read_bytes()
    whole.unlink()
    folder = tmp_path / "metrics"
    for size in range(0, int.from_bytes(content[:4], sys.byteorder), 3):
        for owner in (0, 5_999_999, os.getppid()):
            folder.mkdir()
            (folder / f"counter_{owner}.db").write_bytes(content[:size])
            other = Reserved(str(folder / "counter_5999998.db"))
            other.write_value(key("other"), 7.0, 0.0)
            other.close()
            for _ in range(2):
                assert [s.value for f in families(folder) for s in f.samples if s.labels["endpoint"] == "other"] == [7.0]
            shutil.rmtree(folder)
