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

#: A process that waits, as Dramatiq's master does, for the word that its child has booted; the child is told when to say it.
BOOTING = """
import multiprocessing, os, signal
from madeira.broker import master

def boot(booted):
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    master.end_with_it()
    while not booted._cond._sleeping_count.get_value():
        pass
    os.write(1, b"ready ")
    os.read(0, 1)
    booted.set()
    os.write(1, b"goes on ")

booted = multiprocessing.Event()
multiprocessing.Process(target=boot, args=(booted,)).start()
booted.wait()
os.write(1, b"heard ")
"""

FORBID = "def no(*_): raise PermissionError\nos.pidfd_open = no"

KERNELS = pytest.mark.parametrize(
    "before", ["", "del os.pidfd_open", FORBID], ids=["told by the kernel", "not on Linux", "not allowed"]
)


@KERNELS
def test_the_end_of_a_killed_master_is_noticed(before: str) -> None:
    with started(before) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(12) == b"ready waits "
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b"ended"


@KERNELS
def test_a_master_that_is_gone_already_is_not_waited_for(before: str) -> None:
    with started(before) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.read(6) == b"ready "
        process.kill()
        process.wait()
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read() == b"waits ended"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "alive"])
def test_a_master_that_was_killed_while_it_waited_for_the_boot_holds_up_nothing(is_killed: bool) -> None:
    """A word to somebody who waits is said when he has woken, which who is dead never does."""
    with subprocess.Popen([sys.executable, "-c", BOOTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.read(6) == b"ready "
        if is_killed:
            process.kill()
            process.wait()
        process.stdin.write(b"x")
        process.stdin.flush()
        said = process.stdout.read()
    assert b"goes on " in said
    assert (b"heard " in said) != is_killed


def started(before: str) -> "subprocess.Popen[bytes]":
    line = [sys.executable, "-c", WAITING.format(before=before)]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
