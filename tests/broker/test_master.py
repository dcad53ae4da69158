"""How a process notices that its master is gone; tests/system/test_killed_masters.py says what a worker does then."""

import signal
import subprocess
import sys

import pytest

#: A process whose child waits for its end, and is told when to begin.
WAITING = """
import multiprocessing, os
from madeira.broker import master
{before}

def wait():
    os.write(1, b"ready ")
    os.read(0, 1)
    os.write(1, b"waits ")
    master.wait()
    os.write(1, b"ended")

child = multiprocessing.Process(target=wait)
child.start()
child.join()
"""

FORBID = "def no(*_): raise PermissionError\nos.pidfd_open = no"


@pytest.mark.parametrize("before", ["", "del os.pidfd_open", FORBID], ids=["told by the kernel", "not on Linux", "not allowed"])
def test_the_end_of_a_killed_master_is_noticed(before: str) -> None:
    with started(before) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(12) == b"ready waits "
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b"ended"


def test_a_master_that_is_gone_already_is_not_waited_for() -> None:
    with started() as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.read(6) == b"ready "
        process.kill()
        process.wait()
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read() == b"waits ended"


def started(before: str = "") -> "subprocess.Popen[bytes]":
    line = [sys.executable, "-c", WAITING.format(before=before)]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
