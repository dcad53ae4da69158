"""A receiver that answers 410: whom that ends, and what it may change of what a person has decided."""

import pytest

from madeira.store import holding
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Receiver


def state(process: InProcess) -> str:
    now = holding.read(process.conn, "a")
    assert now is not None
    return now.state


@pytest.mark.parametrize("path", ["/{event_id}", "/x{?trace_id}"])
def test_gone_ends_one_delivery_only_where_the_url_depends_on_the_event(make: Make, receiver: Receiver, path: str) -> None:
    """The address of one event says nothing about those of the others: the endpoint stays as it is."""
    receiver.answer("/gone/e1", Answer(status=410))
    receiver.answer("/gone/x", Answer(status=410))
    process = make({"url": receiver.url("/gone") + path})
    process.start()
    ref = process.routed("a", event_id="e1")
    row = process.wait_status(ref, "dead")
    assert (row["failure_class"], row["last_error_code"]) == ("receiver", "http_410")
    process.wait_place(ref, "nowhere")
    assert state(process) == "active"
