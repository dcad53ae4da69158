"""The way of an event, from a signed POST to its recorded outcome."""

from tests.receiver import Answer, Receiver, json_answer
from tests.system.conftest import Launch


def test_an_event_is_delivered_retried_refused_or_found_to_have_failed_in_its_body(launch: Launch, receiver: Receiver) -> None:
    receiver.queue("/flaky", Answer(status=503), Answer(status=500))
    receiver.answer("/refuse", Answer(status=400))
    receiver.answer("/business", json_answer({"success": False}))
    madeira = launch(
        {
            name: {"url": receiver.url(f"/{name}"), "retry": {"max_attempts": 3}}
            for name in ("good", "flaky", "refuse", "business")
        }
    )
    madeira.api()
    madeira.worker()

    good, flaky, refused, failed = (madeira.post(f"{name}.x", {"n": 1}) for name in ("good", "flaky", "refuse", "business"))

    assert madeira.wait_status(good, "succeeded")["retry_count"] == 0
    assert madeira.wait_status(flaky, "succeeded")["retry_count"] == 2
    madeira.wait_status(refused, "dead")
    madeira.wait_status(failed, "dead")
    assert [a["outcome"] for a in madeira.attempts(flaky)] == ["retryable", "retryable", "succeeded"]
    assert [(a["outcome"], a["error_code"]) for a in madeira.attempts(refused)] == [("permanent", "http_400")]
    assert [a["outcome"] for a in madeira.attempts(failed)] == ["business"] * 3
    calls = receiver.calls_to("/flaky")
    assert len(calls) == 3
    assert len({(call.body, call.webhook_id) for call in calls}) == 1, "one id and the same bytes over all attempts"
    assert receiver.overlaps == {}
