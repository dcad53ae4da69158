"""The programs of the examples do what docs/sending.md says, against the real API and with real calls.

Python and curl with openssl must be on the machine; Node and Go are tried where they are.
"""

import functools
import itertools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import httpx
import pytest

from madeira import client
from madeira.delivery.client import Caller
from madeira.delivery.request import build
from madeira.delivery.verdict import judge
from madeira.states import Outcome
from tests.api.serving import ROOT, SECRET, Api
from tests.client.conftest import answer_lost, passed_on
from tests.delivery.samples import CLAIM, ENDPOINT, LOOPBACK, WHSEC, claim
from tests.receiver import Answer, json_answer

pytestmark = pytest.mark.long

PAGE = (ROOT / "docs" / "sending.md").read_text()

#: What runs a program, by the end of its name.
_TOOLS = {".sh": "curl", ".py": sys.executable, ".mjs": "node", ".go": "go"}

#: May be missing; nothing else may.
_OPTIONAL = {".mjs", ".go"}

#: The first program that Go builds on a machine takes it a minute of all processors.
_GO = functools.partial(pytest.param, marks=pytest.mark.long)

SENDERS = ["send.sh", "send.py", "send_bare.py", "send.mjs", "send.go"]
RECEIVERS = ["receive.py", "receive.mjs", "receive.go"]


def programs(names):
    return [_GO(name) if name.endswith(".go") else name for name in names]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[str], list[str]]:
    """The command that runs an example: ``built("sending/send.go")``; Go's are compiled once."""
    folder = tmp_path_factory.mktemp("built")

    def command(name: str) -> list[str]:
        path = ROOT / "examples" / name
        tool = shutil.which(_TOOLS[path.suffix])
        if tool is None:
            if path.suffix in _OPTIONAL:
                pytest.skip(f"{_TOOLS[path.suffix]} is not on this machine")
            pytest.fail(f"{_TOOLS[path.suffix]} is needed")
        match path.suffix:
            case ".go":
                program = folder / path.stem
                if not program.exists():
                    subprocess.run([tool, "build", "-o", program, path], cwd=folder, check=True, timeout=280)
                return [str(program)]
            case ".sh":
                return ["/bin/sh", str(path)]
            case _:
                return [tool, str(path)]

    return command


def run(command: list[str], *args: str, url: str, secret: str = SECRET) -> "subprocess.CompletedProcess[str]":
    """Run a sender to its end."""
    env = {"PATH": os.environ["PATH"], "URL": url, "SOURCE": "shop", "SECRET": secret}
    return subprocess.run([*command, *args], env=env, capture_output=True, text=True, check=False, timeout=60)


def test_every_program_on_the_page_is_the_file_and_every_file_is_on_the_page():
    """Word for word."""
    shown = dict(re.findall(r"^<!-- (examples/\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    files = {
        str(file.relative_to(ROOT)): file.read_text()
        for folder in ("sending", "receiving")
        for file in (ROOT / "examples" / folder).iterdir()
        if file.is_file()
    }
    assert set(shown) == set(files)
    for name, text in files.items():
        assert shown[name] == text, f"{name} is not what docs/sending.md shows"


def test_every_program_is_run_here():
    """None is added that nobody tries."""
    tried = {f"sending/{name}" for name in [*SENDERS, "send_batch.sh"]} | {f"receiving/{name}" for name in RECEIVERS}
    assert tried == {
        f"{p.parent.name}/{p.name}"
        for folder in ("sending", "receiving")
        for p in (ROOT / "examples" / folder).iterdir()
        if p.is_file()
    }


def test_the_other_python_on_the_page_runs_too(between, connect):
    """Going on after a failure, and a transport of one's own."""
    fragments = re.findall(r"(?<!\.py -->\n)```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(fragments) == 2
    between.queue("/v1/events/batch", Answer(status=503))
    between.default(lambda call: json_answer({"accepted": call.body.count(b"\n"), "duplicates": 0, "rejected": []}))
    events = [{"event_type": "a.b", "payload": n} for n in range(1500)]
    names = {"client": connect(between.url(""), retries=0), "events": events}
    exec(fragments[0], {"itertools": itertools, "Unavailable": client.Unavailable} | names)
    sent = [json.loads(line)["payload"] for call in between.calls[1:] for line in call.body.splitlines()]
    assert sent == list(range(1500))
    given = {"url": between.url(""), "source": "shop", "secret": SECRET, "ssl_context": ssl.create_default_context()}
    with eval(fragments[1], {"Client": client.Client, "httpx": httpx} | given) as made:
        assert repr(made).endswith("source='shop')")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", programs(SENDERS))
def test_a_sender_gets_its_event_accepted_and_repeats_it_without_harm(built, shared_api, name):
    """The first time it is new, the second time known; with a wrong secret the program fails."""
    command = built(f"sending/{name}")
    event_id = f"from-{name}"
    first, second = (run(command, event_id, url=url(shared_api)) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert event_id in first.stdout
    assert event_id in second.stdout
    assert not is_duplicate(first.stdout)
    assert is_duplicate(second.stdout)
    stored = shared_api.get(f"/v1/events/{event_id}", source="shop").json
    assert (stored["event_type"], stored["payload"]) == ("order.created", {"total": 42})
    forged = run(command, event_id, url=url(shared_api), secret="wrong")
    assert forged.returncode != 0
    assert "wrong" not in forged.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", programs(SENDERS))
def test_a_sender_tries_again_when_nothing_was_decided(built, shared_api, between, name):
    """503 with Retry-After, then (but for curl, which leaves that to its user) a connection that ends, then the answer."""
    command = built(f"sending/{name}")
    broken = [] if name.endswith(".sh") else [answer_lost(shared_api)]
    between.queue("/v1/events", Answer(status=503, headers={"Retry-After": "1"}), *broken)
    between.default(passed_on(shared_api))
    done = run(command, f"again-{name}", url=between.url(""))
    assert done.returncode == 0, done.stderr
    calls = between.calls_to("/v1/events")
    assert len(calls) == 2 + len(broken)
    assert calls[1].at - calls[0].ended >= 0.99
    assert len({call.body for call in calls}) == 1
    assert is_duplicate(done.stdout) == bool(broken)


def test_the_client_of_the_example_sends_many_too(built, shared_api):
    """Three thousand, and the same again."""
    command = built("sending/send.py")
    outputs = [run(command, "many", url=url(shared_api)).stdout for _ in range(2)]
    assert "3000 accepted, 0 known before, 0 refused" in outputs[0]
    assert "0 accepted, 3000 known before, 0 refused" in outputs[1]


def test_a_file_of_events_goes_as_a_batch_by_curl(built, shared_api, tmp_path):
    """The line that is wrong is named, the others are in."""
    lines = [
        {"event_id": f"curl-{n}", "event_type": "a.b" if n != 3 else "a b", "payload": {"text": "a\nb"}} for n in range(1, 6)
    ]
    file = tmp_path / "events.ndjson"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(built("sending/send_batch.sh"), str(file), url=url(shared_api))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["accepted"], told["duplicates"], [r["line"] for r in told["rejected"]]) == (4, 0, [3])
    assert told["rejected"][0]["type"] == "invalid"
    assert json.loads(run(built("sending/send_batch.sh"), str(file), url=url(shared_api)).stdout)["duplicates"] == 4
    assert run(built("sending/send_batch.sh"), str(file), url=url(shared_api), secret="wrong").returncode != 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", programs(RECEIVERS))
def test_a_receiver_takes_what_madeira_sends_and_nothing_else(built, name):
    """By the new secret and the old one; a repetition is not taken in; a forgery and a test call are refused for good."""
    with (
        listening(built(f"receiving/{name}"), f"{WHSEC} old-secret") as (address, lines),
        Caller(max_connections=1, egress=LOOPBACK) as caller,
    ):

        def outcome(of_claim, *secrets: str, test: bool = False) -> Outcome:
            to = replace(ENDPOINT, url=address, secrets=secrets)
            request = build(of_claim, to, now=datetime.now(UTC), test=test)
            return judge(caller.call(request, deadline_s=10), to).outcome

        assert outcome(CLAIM, WHSEC) is Outcome.SUCCEEDED
        assert lines() == f"{CLAIM.event_type} {CLAIM.event_id}"
        assert outcome(claim(attempt=2), "newest", "old-secret") is Outcome.SUCCEEDED
        assert outcome(CLAIM, "forged") is Outcome.PERMANENT
        assert lines().startswith("refused"), "the repetition was taken in a second time"
        assert outcome(claim(delivery_id=1), WHSEC, test=True) is Outcome.PERMANENT
        assert lines().startswith("refused"), "a test call was taken for a delivery"


@contextmanager
def listening(command: list[str], secrets: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """A running receiver: its address, and what gives the next line that it prints."""
    env = {"PATH": os.environ["PATH"], "PORT": "0", "SECRETS": secrets}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # A program that says nothing must not hold the test for ever.
        watch = threading.Timer(60, process.kill)
        watch.start()
        try:
            first = process.stdout.readline()
            found = re.fullmatch(r"listening on port (\d+)\n", first)
            assert found, f"it said {first!r}"
            yield f"http://127.0.0.1:{found[1]}/hook", lambda: process.stdout.readline().strip()
        finally:
            watch.cancel()
            process.kill()


def is_duplicate(printed: str) -> bool:
    """Whether a sender says that its event was known."""
    return '"duplicate": true' in printed or "known before" in printed.splitlines()[0]


def url(api: Api) -> str:
    return f"http://127.0.0.1:{api.port}"
