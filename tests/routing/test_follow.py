import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from madeira.errors import SettingsError
from madeira.routing.config import Rules
from madeira.routing.follow import RulesFollower


def source(name: str) -> str:
    return f'[[source]]\nname = "{name}"\nsecrets = ["x"]\n'


class Changes:
    """Collects what a follower tells, so that a test can wait for it."""

    def __init__(self) -> None:
        self.seen: list[Rules] = []
        self._told = threading.Semaphore(0)

    def __call__(self, rules: Rules) -> None:
        self.seen.append(rules)
        self._told.release()

    def wait(self) -> Rules:
        assert self._told.acquire(timeout=5), "no change was told"
        return self.seen[-1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(source("one"))
    return path


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def follower(file: Path, changes: Changes) -> Iterator[RulesFollower]:
    follower = RulesFollower(path=file, on_change=changes)
    follower.start()
    yield follower
    follower.stop()


def test_a_changed_file_counts(file: Path, follower: RulesFollower, changes: Changes) -> None:
    """A file that is replaced while the process runs brings new rules, and whoever depends on them is told."""
    version = follower.version
    other = file.with_suffix(".new")
    other.write_text(source("two"))
    while other.stat().st_ctime_ns // 1_000_000 <= version:
        # A file system's clock goes in steps; nobody changes a file twice in one.
        os.utime(other, (0, 0))
    other.rename(file)
    assert "two" in changes.wait().sources
    assert "two" in follower.current.sources
    assert follower.version > version
    assert RulesFollower(path=file).version == follower.version


def test_a_change_that_keeps_size_and_time_counts_too(file: Path, follower: RulesFollower, changes: Changes) -> None:
    """The content decides, not the file's time or size."""
    before = file.stat()
    file.write_text(source("eno"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    follower.reload()
    assert "eno" in changes.wait().sources


def test_a_bad_file_leaves_the_old_rules(file: Path, follower: RulesFollower, changes: Changes) -> None:
    """A mistake is logged once and changes nothing; the corrected file counts."""
    with capture_logs() as lines:
        file.write_text("[[source]]\nname = 1\n")
        while not lines:
            follower.reload()
        for _ in range(3):
            follower.reload()
        assert "one" in follower.current.sources
        file.write_text(source("mended"))
        assert "mended" in changes.wait().sources
    refused = [line for line in lines if line["event"] == "rules.refused"]
    assert len(refused) == 1
    assert "field name" in refused[0]["error"]


@pytest.mark.parametrize(
    "broken", ["", "x = " + "[" * 100_000, "x = " + "1" * 5000, '[[endpoint]]\nname = "e"\nurl = "http://h/"\n']
)
def test_whatever_is_wrong_the_following_goes_on(file: Path, follower: RulesFollower, changes: Changes, broken: str) -> None:
    """An emptied file, one that the parser gives up on, one without any source: refused once, and a mended one counts."""
    with capture_logs() as lines:
        file.write_text(broken)
        while not lines:
            follower.reload()
        assert "one" in follower.current.sources
        file.write_text(source("mended"))
        assert "mended" in changes.wait().sources
    assert [line["event"] for line in lines] == ["rules.refused", "rules.changed"]


@pytest.mark.parametrize("broken", [None, b"\xff", b"", b"[[source]]\nname = 1\n"])
def test_a_start_with_a_bad_file_goes_by_the_last_good_one(file: Path, tmp_path: Path, broken: bytes | None) -> None:
    """A process that starts again while the file is wrong or gone goes on with the rules from before, and says so."""
    copy = tmp_path / "data" / "copy.toml"
    RulesFollower(path=file, last_good=copy)
    assert copy.stat().st_mode & 0o777 == 0o600
    assert list(copy.parent.iterdir()) == [copy]
    file.unlink() if broken is None else file.write_bytes(broken)
    with capture_logs() as lines:
        follower = RulesFollower(path=file, last_good=copy)
    assert "one" in follower.current.sources
    assert follower.version > 0
    assert [(line["event"], line["log_level"]) for line in lines] == [("rules.refused", "error")]
    assert str(file) in lines[0]["error"]


def test_the_copy_is_that_of_the_last_change(file: Path, tmp_path: Path, changes: Changes) -> None:
    """A file that is accepted while the process runs is kept too; one that is refused is not."""
    copy = tmp_path / "copy.toml"
    follower = RulesFollower(path=file, on_change=changes, last_good=copy)
    follower.start()
    try:
        file.write_text(source("two"))
        changes.wait()
        assert copy.read_text() == source("two")
        with capture_logs() as lines:
            file.write_text("no")
            while not lines:
                follower.reload()
        assert copy.read_text() == source("two")
    finally:
        follower.stop()


def test_a_copy_that_cannot_be_kept_does_not_matter_now(file: Path, tmp_path: Path) -> None:
    """The rules hold where the copy's folder cannot be made; it is told."""
    (tmp_path / "taken").write_text("")
    with capture_logs() as lines:
        assert "one" in RulesFollower(path=file, last_good=tmp_path / "taken" / "copy.toml").current.sources
    assert [line["event"] for line in lines] == ["rules.not_kept"]


def test_a_file_that_vanishes_leaves_the_old_rules(file: Path, follower: RulesFollower, changes: Changes) -> None:
    """Between a file's removal and its return the old rules hold."""
    with capture_logs() as lines:
        file.unlink()
        while not any(line["event"] == "rules.refused" for line in lines):
            follower.reload()
        assert "one" in follower.current.sources
        file.write_text(source("back"))
        assert "back" in changes.wait().sources


def test_a_listener_that_fails_does_not_end_the_following(file: Path) -> None:
    """An error of whoever is told is logged; the next change is told again."""
    told = Changes()

    def fail_first(rules: Rules) -> None:
        told(rules)
        if len(told.seen) == 1:
            raise RuntimeError("listener")

    follower = RulesFollower(path=file, on_change=fail_first)
    follower.start()
    try:
        file.write_text(source("two"))
        assert "two" in told.wait().sources
        file.write_text(source("three"))
        assert "three" in told.wait().sources
    finally:
        follower.stop()


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    """A process does not come up with other rules than those it was given."""
    with pytest.raises(SettingsError, match="cannot be read"):
        RulesFollower(path=tmp_path / "none.toml")


def test_a_wrong_file_stops_the_start(file: Path) -> None:
    """A mistake at the start is an error, not a log line."""
    file.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="UTF-8"):
        RulesFollower(path=file)


def test_without_a_file_the_built_in_rules_hold() -> None:
    """No file: the callback endpoint, and nothing to follow."""
    follower = RulesFollower(path=None)
    follower.start()
    assert set(follower.current.endpoints) == {"callback"}
    follower.stop()
