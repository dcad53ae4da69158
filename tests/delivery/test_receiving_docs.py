"""docs/receiving.md says what is true: its code is run against real calls, its tables are held against the code."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from madeira.delivery.client import Caller
from madeira.delivery.request import OutboundRequest, build
from madeira.delivery.verdict import judge
from madeira.states import Outcome
from tests.delivery.samples import CLAIM, ENDPOINT, LOOPBACK, WHSEC, claim, endpoint

PAGE = (Path(__file__).parents[2] / "docs" / "receiving.md").read_text()


@pytest.fixture(scope="module")
def docs() -> dict[str, Any]:
    """What the page's Python blocks define, run one after the other."""
    namespace: dict[str, Any] = {"__name__": "receiving"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/receiving.md", "exec"), namespace)
    return namespace


@pytest.fixture
def running(docs) -> Iterator[str]:
    """The URL of the page's complete receiver."""
    server = docs["serve"](0)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook"
    server.shutdown()
    thread.join()
    server.server_close()


def made(**changes: Any) -> OutboundRequest:
    return build(CLAIM, endpoint(**changes), now=datetime.now(UTC))


@pytest.mark.parametrize("verifier", ["verify_standard", "verify_madeira"])
@pytest.mark.parametrize("secret", [WHSEC, "plain s\u00e9cret"])
def test_both_verifiers_take_a_genuine_call_and_nothing_else(docs, verifier, secret):
    """With one secret or two; not with another secret, another body, or an old timestamp."""
    verify = docs[verifier]
    for secrets in ((secret,), (secret, "old"), ("new", secret)):
        request = made(secrets=secrets)
        assert verify(secret, dict(request.headers), request.body)
        assert not verify("another", dict(request.headers), request.body)
        assert not verify(secret, dict(request.headers), request.body + b" ")
        assert not verify(secret, {}, request.body)
    old = build(CLAIM, endpoint(secrets=(secret,)), now=datetime.now(UTC) - timedelta(seconds=310))
    assert not verify(secret, dict(old.headers), old.body)


def test_the_openssl_line_makes_the_same_signature(tmp_path):
    """As it stands on the page."""
    if shutil.which("openssl") is None:
        pytest.fail("openssl is needed")
    [line] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    request = made()
    sent = dict(request.headers)
    (tmp_path / "body.json").write_bytes(request.body)
    printed = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=tmp_path,
        env={"TIMESTAMP": sent["X-Madeira-Timestamp"], "SECRET": WHSEC, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert printed.stdout.split()[0] == sent["X-Madeira-Signature"]


def test_the_complete_receiver_takes_what_madeira_sends(docs, running):
    """A real call succeeds, its repetition changes nothing, a forged one is refused for good."""
    docs["taken_in"].clear()
    assert docs["SECRET"] == WHSEC
    with Caller(max_connections=1, egress=LOOPBACK) as caller:

        def outcome(of_claim, of_endpoint) -> Outcome:
            request = build(of_claim, of_endpoint, now=datetime.now(UTC))
            return judge(caller.call(request, deadline_s=10), of_endpoint).outcome

        genuine = replace(ENDPOINT, url=running)
        assert outcome(CLAIM, genuine) is Outcome.SUCCEEDED
        assert outcome(claim(attempt=2), genuine) is Outcome.SUCCEEDED
        assert outcome(CLAIM, replace(genuine, secrets=("forged",))) is Outcome.PERMANENT
    assert list(docs["taken_in"].values()) == [build(CLAIM, ENDPOINT, now=datetime.now(UTC)).body]


def test_every_header_on_the_page_is_sent_and_every_header_sent_is_on_the_page():
    """The table and the code do not drift apart."""
    table = {name.lower() for name in re.findall(r"^\| `([A-Za-z-]+)` \|", PAGE, re.MULTILINE)}
    assert table == {name.lower() for name, _ in made().headers} - {"accept-encoding"}


def test_the_body_on_the_page_is_a_body_of_ours():
    """Field for field."""
    [example] = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)
    request = build(claim(payload='{"amount": 12345678901234567890}'), ENDPOINT, now=datetime.now(UTC))
    assert request.body.decode() == example
