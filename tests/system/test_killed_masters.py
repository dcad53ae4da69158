"""A master that is killed: what it had started finishes what it has begun, and ends; whatever is started next does the rest."""

import os
import signal
from collections.abc import Sequence

import pytest

from madeira.cli.running import members
from madeira.embedded import free_port
from tests.receiver import Answer, Gate, Receiver
from tests.system.conftest import Launch
from tests.system.harness import wait_until
from tests.system.test_stopping import answers


@pytest.mark.parametrize("options", [(), pytest.param(("--use-spawn",), marks=pytest.mark.long)], ids=["forked", "spawned"])
def test_workers_whose_master_was_killed_finish_their_calls_and_end(
    launch: Launch, receiver: Receiver, options: Sequence[str]
) -> None:
    """No call is broken off or made twice, also when those who are left are told to end; the next ones keep to the lane's cap."""
    gate, page = Gate(), free_port()
    receiver.queue("/a", *(Answer(hold=gate) for _ in range(6)))
    endpoint = {"url": receiver.url("/a"), "timeout": 60, "concurrency": 6}
    madeira = launch({"a": endpoint}, env={"MADEIRA_METRICS_PORT": str(page)})
    madeira.api()
    killed = madeira.worker(processes=2, options=options)
    wait_until(lambda: answers(page), what="the page")
    events = madeira.post_many(20)
    receiver.wait_for(6)
    os.kill(killed.pid, signal.SIGKILL)
    killed.popen.wait(10)
    wait_until(lambda: killed.tail(10**7).count("worker.master_gone") == 2, what="the notice of both")
    wait_until(lambda: not answers(page), what="the end of the page")
    # Whoever looks after a master ends what it has left: systemd, `madeira up`.
    killed.signal_group(signal.SIGTERM)
    madeira.worker(processes=2)
    assert receiver.in_progress == 6
    gate.set()
    wait_until(lambda: not members(killed.pid), what="the end of what the master has left")
    madeira.wait_all()
    assert (receiver.count(), receiver.max_overlap) == (20, 6)
    assert [[row["outcome"] for row in madeira.attempts(event)] for event in events] == [["succeeded"]] * 20
