"""What each long-lived process does for itself once its modules are imported, before it starts a thread."""

import gc
import os
import resource
from contextlib import suppress
from typing import Final

#: Open files and connections that a process may have if whoever started it lets it: many times what it needs.
_DESCRIPTORS_MAX: Final = 65_536


def prepare() -> None:
    """Keep the collector and the kernel's scheduler from what they would do in vain.

    What was imported lives as long as the process: the collector need not look through it, least of all at the end.

    A thread that is woken takes no processor from one that works (``SCHED_BATCH``, sched(7)): as a rule it would be the one that
    woke it and that holds Python's lock, and the two would change places twice for nothing. An idle processor takes it at
    once, as ever. Where the kernel has no such policy, or allows none, all else goes on. So it does where whoever started the
    process has chosen another policy (``chrt``, ``CPUSchedulingPolicy=`` of systemd), which stays.

    The limit of open files is what the system lets the process raise it to. The usual 1,024 are there for programs that use
    select(2), which none of this does.
    """
    gc.freeze()
    _raise_descriptors()
    # Not every system has these names.
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def descriptors() -> int:
    """How many files and connections this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


def _raise_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    if descriptors() < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
