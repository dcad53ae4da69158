"""Whatever stands in a field that comes from outside is shown as text: nothing of it runs, and the page holds together.

The rows are written as the database lets them through, whether or not a door would have refused them.
"""

import json
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.console.words import address
from madeira.states import Outcome, Role
from madeira.store import audit, jobs, notices
from madeira.store.deliveries import SettleRequest, settle
from madeira.store.jobs import NewJob
from madeira.store.notices import Kind
from madeira.store.selection import Selection
from tests.api.people import token
from tests.api.serving import Api
from tests.browser.conftest import Windows
from tests.browser.window import DESK, PHONE
from tests.store import making

Connection = psycopg.Connection[Any]

#: What somebody may send who means harm, or means nothing.
TEXTS = {
    "script": "</textarea></pre></td></svg></title><script>window.ran = 1; alert(1)</script>",
    "image": "'\"><img src=x onerror=\"window.ran = 1\"><svg onload='window.ran = 1'>{{ 7 * 7 }}${window.ran=1}",
    "address": "javascript:window.ran=1//http://evil.example/?a=b&c=%00",
    "right-to-left": "invoice\u202efdp.exe \u2067moc.elpmaxe\u2069 \u05e9\u05dc\u05d5\u05dd",
    "control": "a\x01b\x07c\x1b[31mred\x7f\u0085\ufeff\u200b\\u0000 \ufffe",
    "one word": "w" * 10_000,
    "many lines": "line\n\n\t  line\r\n" * 200,
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3f4\u200d\u2620\ufe0f e" + "\u0301" * 60,
}


class Scene:
    """One text in every field, and the pages that show it."""

    def __init__(self, conn: Connection, text: str) -> None:
        short = text[:120]
        event_id = f"{text[:100]}"
        fields = {
            "event_type": text,
            "trace_id": short,
            "routing_key": text,
            "target_uri": f"http://x/{text}",
            "source": short[:60],
        }
        content = {"payload": json.dumps({text: text}, ensure_ascii=False), "parameters": json.dumps({text: text})}
        [ref] = making.routed(conn, (short,), event_id=event_id, **fields, **content)
        kept = {
            "request": {"method": "POST", "headers": [[text, text]], "body_length": 1, "body_sha256": "ab" * 32},
            "answer": {"headers": [[text, text]], "complete": True},
        }
        held = making.claimed(conn, ref)
        failed = making.attempt(
            Outcome.PERMANENT, reason=text, url=text, excerpt=text.encode() + b"\x00\xff", exchange=json.dumps(kept)
        )
        decision = replace(making.GIVE_UP, last_error=text)
        settle(conn, [SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, failed, decision, worker=text)])
        making.routed(conn, (short, "other"), event_id=f"w{event_id}", **fields)
        for kind in Kind:
            notices.write(conn, kind, short, {"reason": text, "by": text})
        audit.record(conn, text, text, f"event {short[:60]}/{event_id}", text, {text: text})
        audit.record(conn, short, "pause", "endpoint sink", text, {"after": text})
        conn.execute(
            "UPDATE endpoint SET state = 'paused', state_reason = %s, state_by = %s, state_since = now() WHERE name = 'sink'",
            (text, text),
        )
        job = NewJob(action="replay", selection=Selection(endpoint=short), reason=text, key=None)
        number = jobs.create(conn, job, text)[0]["id"]
        conn.execute("UPDATE job SET error = %s WHERE id = %s", (text, number))
        self.pages = {
            "overview": "/console",
            "events": "/console/events",
            "event": address("events", event_id, source=short[:60]),
            "waiting": address("events", f"w{event_id}", source=short[:60]),
            "dead-letters": "/console/dead-letters",
            "dead-letter": f"/console/dead-letters/{ref.delivery_id}",
            "preview": "/console/jobs/new?action=replay",
            "jobs": "/console/jobs",
            "job": f"/console/jobs/{number}",
            "endpoints": "/console/endpoints",
            "endpoint": "/console/endpoints/sink",
            "audit": "/console/audit",
            "asked": address("events", q=short, source=short[:60], event_type=short),
            "problem": address("endpoints", short),
        }


@pytest.mark.parametrize("kind", list(TEXTS))
def test_whatever_comes_from_outside_is_text_and_the_page_holds_together(windows: Windows, conn: Connection, kind: str) -> None:
    conn.execute("TRUNCATE event, delivery, job, notice, audit CASCADE")
    scene = Scene(conn, TEXTS[kind])
    seen = windows(Role.OPERATOR)
    for name, at in scene.pages.items():
        page = seen.open(at)
        for folded in page.locator("details:not([open]) > summary").all():
            if folded.is_visible():
                folded.click()
        assert page.evaluate("window.ran") is None, name
        assert page.locator("main img, main script, main iframe").count() == 0, name
        assert page.evaluate("document.querySelector('main a[href^=\"javascript:\"]')") is None, name
        for width in (DESK, PHONE):
            seen.narrow(width)
            faults = seen.faults()
            if width == PHONE and name in ("overview", "event", "dead-letters"):
                seen.picture(f"hostile-{kind.replace(' ', '-')}-{name}-{width}")
            assert not faults, "\n".join([f"{name}, {width} px", *faults])
        seen.narrow(DESK)
        assert page.locator("footer").is_visible(), name


def test_letters_that_reverse_others_are_written_out(windows: Windows, conn: Connection) -> None:
    conn.execute("TRUNCATE event, delivery, job, notice, audit CASCADE")
    scene = Scene(conn, TEXTS["right-to-left"])
    seen = windows(Role.VIEWER)
    for name in ("event", "dead-letter", "audit", "events"):
        seen.open(scene.pages[name])
        assert "invoice\\u202efdp.exe" in seen.text(), name
        assert "\u202e" not in seen.page.locator("body").inner_text(), name


def test_the_name_of_a_token_is_text(windows: Windows, shared_api: Api) -> None:
    name = "<img-onerror>" + "n" * 40
    seen = windows(None, width=PHONE)
    seen.sign_in(token(shared_api, Role.VIEWER, name=name)[0])
    assert name in seen.page.locator(".who").inner_text()
    assert seen.faults() == []
