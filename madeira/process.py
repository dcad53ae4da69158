"""What each long-lived process does for itself once its modules are imported, before it starts a thread."""

import gc
import os
from contextlib import suppress


def prepare() -> None:
    """Keep the collector and the kernel's scheduler from what they would do in vain.

    What was imported lives as long as the process: the collector need not look through it, least of all at the end.

    A thread that is woken takes no processor from one that works (``SCHED_BATCH``, sched(7)): as a rule it would be the one that
    woke it and that holds Python's lock, and the two would change places twice for nothing. An idle processor takes it at
    once, as ever. Where the kernel has no such policy, or allows none, all else goes on. So it does where whoever started the
    process has chosen another policy (``chrt``, ``CPUSchedulingPolicy=`` of systemd), which stays.
    """
    gc.freeze()
    # Not every system has these names.
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
