"""What a process does for itself before it works."""

import os
import subprocess
import sys

import pytest

from madeira import process

SEEN = """
import gc, os, threading
from madeira import process
{before}
process.prepare()
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(gc.get_freeze_count() > 0, seen[0] == os.{policy})
"""


def seen(policy: str, before: str = "") -> str:
    line = [sys.executable, "-c", SEEN.format(policy=policy, before=before)]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_threads_that_are_woken_take_no_processor_from_the_one_that_wakes_them() -> None:
    assert seen("SCHED_BATCH") == "True True\n"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_where_the_kernel_allows_it_to_none_the_process_starts_all_the_same() -> None:
    forbid = "def no(*_): raise PermissionError\nos.sched_setscheduler = no"
    assert seen("SCHED_OTHER", forbid) == "True True\n"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_a_policy_that_somebody_has_chosen_stays() -> None:
    assert seen("SCHED_IDLE", "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))") == "True True\n"


def test_a_system_without_such_policies_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setscheduler", raising=False)
    monkeypatch.setattr("gc.freeze", lambda: None)
    process.prepare()


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    """What started it had 1,024 as shells have, of 4,096 allowed."""
    script = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))\n"
        "from madeira import process\nprocess.prepare()\n"
        "print(process.descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    line = [sys.executable, "-c", script]
    assert subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout == "4096 (4096, 4096)\n"
