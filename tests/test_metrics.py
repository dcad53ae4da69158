"""The numbers of several processes on one page: each test runs processes of its own, since a process has one registry."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a process of its own, of one family; returns what it prints."""

    def run(code: str) -> str:
        environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


PAGE = "from madeira import metrics; print(metrics.page().decode())"

COUNT = "from madeira import metrics; metrics.DEAD_LETTERS.labels('e', 'receiver').inc()"


def test_processes_are_added_up(run: Run) -> None:
    """Counts of processes that are gone are still counted."""
    run(COUNT)
    run(COUNT)
    assert 'madeira_dead_letters_total{endpoint="e",failure_class="receiver"} 2.0' in run(PAGE)


def test_gauges_of_dead_processes_are_dropped(run: Run) -> None:
    """A killed process's connections are not open any more."""
    run("from madeira import metrics; metrics.POOL_CONNECTIONS.labels('p').set(7); import os; os._exit(0)")
    assert "madeira_pool_connections{" not in run(PAGE)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x40\x00\x00\x00\x00\x00\x00\x00garbage" + b"{" * 100])
def test_one_bad_file_spoils_nothing(run: Run, tmp_path: Path, content: bytes) -> None:
    """A file torn by a crash is left out, the others are told."""
    run(COUNT)
    (tmp_path / "counter_1.db").write_bytes(content)
    assert "madeira_dead_letters_total{" in run(PAGE)


def test_a_count_and_a_state_may_share_a_name(run: Run) -> None:
    """How many died so far and how many are dead now stand beside each other."""
    page = run(
        "from madeira import metrics; metrics.DEAD_LETTERS.labels('e', 'receiver').inc()\n"
        "print(metrics.page(metrics.DEAD_LETTERS_NOW.of({('e',): 3})).decode())"
    )
    assert 'madeira_dead_letters_total{endpoint="e",failure_class="receiver"} 1.0' in page
    assert 'madeira_dead_letters{endpoint="e"} 3.0' in page


def test_a_label_from_outside_cannot_break_the_page(run: Run) -> None:
    """Names are escaped: one line stays one line."""
    page = run("from madeira import metrics\nprint(metrics.page(metrics.QUEUE_OLDEST_AGE.of({('a\"} 1\\nb',): 3})).decode())")
    assert r'madeira_queue_oldest_age_seconds{queue="a\"} 1\nb"} 3.0' in page


def test_every_name_is_ours_and_described(run: Run) -> None:
    """All names have the prefix; there is no `_created` noise."""
    page = run(PAGE)
    assert re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert all(name.startswith("madeira_") for name in re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    assert "_created" not in page


def test_the_page_is_served(run: Run) -> None:
    """A process that is no web server shows its numbers at /metrics, and nothing else."""
    run(COUNT)
    code = (
        "import threading, urllib.error, urllib.request; from madeira import metrics_page, settings\n"
        "server = metrics_page.serve('127.0.0.1', 0, folder=settings.metrics_folder())\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "url = f'http://127.0.0.1:{server.server_port}'\n"
        "answer = urllib.request.urlopen(url + '/metrics')\n"
        "print(answer.headers['Content-Type'], answer.read().decode())\n"
        "try: urllib.request.urlopen(url + '/')\n"
        "except urllib.error.HTTPError as e: print('other', e.code); e.close()\n"
        "server.shutdown()"
    )
    told = run(code)
    assert told.startswith("text/plain")
    assert "madeira_dead_letters_total{" in told
    assert "other 404" in told
