"""What was sent and what came back stays on record of attempts that failed, and of no others."""

from typing import Any

from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Receiver

CREDENTIAL = "Bearer credential-of-the-endpoint"


def exchanges(process: InProcess) -> list[Any]:
    return [row[0] for row in process.conn.execute("SELECT exchange FROM delivery_log ORDER BY id")]


def test_a_refused_call_is_on_record_with_both_sides_and_without_the_credential(make: Make, receiver: Receiver) -> None:
    receiver.answer("/a", Answer(status=403, headers={"X-Refused-By": "the gate", "X-Saw": CREDENTIAL}, body=b"no"))
    process = make({"headers": {"Authorization": CREDENTIAL}})
    process.start()
    process.wait_status(process.routed(), "dead")
    [found] = exchanges(process)
    [call] = receiver.calls
    sent, received = dict(found["request"]["headers"]), dict(found["answer"]["headers"])
    assert (sent["webhook-id"], sent["Authorization"]) == (call.headers["webhook-id"], "***")
    assert (found["request"]["method"], found["request"]["body_length"]) == ("POST", len(call.body))
    assert (received["x-refused-by"], received["x-saw"]) == ("the gate", "***")


def test_a_call_that_nobody_answered_is_on_record_with_its_request(make: Make, receiver: Receiver) -> None:
    receiver.answer("/a", Answer(reset=True))
    process = make({"retry": {"max_attempts": 1}})
    process.start()
    process.wait_status(process.routed(), "dead")
    [found] = exchanges(process)
    assert found["answer"] is None
    assert found["request"]["headers"]


def test_of_a_success_nothing_is_kept_besides(process: InProcess) -> None:
    process.wait_status(process.routed(), "succeeded")
    assert exchanges(process) == [None]
