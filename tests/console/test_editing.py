"""Sources, endpoints and routes made, changed and removed by forms: as the API would, and with nobody's work lost."""

import json
import uuid
from typing import Any

import psycopg
import pytest

from madeira.console import fields
from madeira.routing.fields import KINDS
from madeira.states import Role
from tests.api.people import ADMIN, audited, bearer, in_json, token
from tests.api.serving import Api, event
from tests.console.browser import Browser, Seen, administrator, filled, somebody
from tests.console.scenes import HOSTILE, LARGEST, made_endpoint
from tests.store import making

Connection = psycopg.Connection[Any]

SECRET = "a-secret-that-nobody-may-see"


def unique(prefix: str = "n") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def of(api: Api, kind: str, name: str) -> dict[str, Any]:
    """An object as the API shows it, without what it tells beside its fields."""
    found = api.get(f"/v1/{kind}s/{name}", admin=True).json
    beside = {"version", "created_at", "updated_at", "state", "reason", "since", "by", "lane", "unfinished"}
    return {name: value for name, value in found.items() if name not in beside}


def made(api: Api, kind: str, **document: Any) -> str:
    name = unique()
    reply = api.request("POST", f"/v1/{kind}s", json.dumps({"name": name} | document).encode(), in_json(ADMIN))
    assert reply.status == 201, reply.body
    return name


def patched(api: Api, kind: str, name: str, who: dict[str, str] = ADMIN, **patch: Any) -> None:
    reply = api.request("PATCH", f"/v1/{kind}s/{name}?reason=theirs", json.dumps(patch).encode(), in_json(who))
    assert reply.status == 200, reply.body


def edit(browser: Browser, kind: str, name: str) -> Seen:
    return browser.get(f"/console/{kind}s/{name}/edit")


def wrong(seen: Seen, name: str) -> str:
    """What is told beside a field."""
    return " ".join(e.text for e in seen.root.all("span", class_="needs") if e.attributes.get("id", "").startswith(f"f-{name}-"))


#: A document with every field of its kind.
FULL: dict[str, dict[str, Any]] = {
    "source": {"secrets": [SECRET, "env:SHOP_SECRET"], "rate": 2.5, "burst": 7},
    "endpoint": {
        "url": "http://127.0.0.1:9/{event_type}",
        "method": "PUT",
        "headers": {"Authorization": f"Bearer {SECRET}", "X-From": "env:FROM_WHOM"},
        "body": '{"line": {{ payload.n | tojson }},\n "two": 2}\n',
        "secrets": [SECRET],
        "client_certificate": {"chain": "env:CHAIN", "key": "env:KEY"},
        "success": "status == 200 && body.ok == true",
        "require_body": True,
        "rate": 1000000 / 100,
        "burst": 3,
        "concurrency": 4,
        "timeout": 0.5,
        "retry": {"jitter": 0.25, "max_attempts": 3, "max_age": 60.0, "delays": [1.0, 5.5, 30.0]},
        "ordering": "payload.account",
        "breaker": {"enabled": False, "hold": 2.0},
    },
    "route": {
        "endpoint": "sink",
        "source": "shop",
        "event_type": "order.*",
        "routing_key": "eu",
        "filter": 'payload.amount > 10 && payload.note != "x"',
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_its_place_and_a_form_that_is_saved_untouched_changes_nothing(shared_api: Api, kind: str) -> None:
    name = made(shared_api, kind, **FULL[kind])
    browser = administrator(shared_api)
    seen = edit(browser, kind, name)
    assert seen.status == 200, seen.text
    assert len(seen.reply.body) < LARGEST
    assert SECRET not in seen.reply.body.decode()
    before, rows = of(shared_api, kind, name), audited(shared_api)
    saved = browser.submit(seen, "/edit", do="save")
    assert saved.address == f"/console/{kind}s/{name}", saved.text
    assert "Nothing was changed" in saved.root.one(id="done").text
    assert of(shared_api, kind, name) == before
    assert audited(shared_api) == rows


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_is_made_by_a_form_with_one_row_on_record(shared_api: Api, conn: Connection, kind: str) -> None:
    given = {
        "source": {"secrets.new1": SECRET, "rate": "2.5", "burst": " 7 "},
        "endpoint": {
            "url": "http://127.0.0.1:9/x",
            "rate": "5",
            "headers.new1.name": "X-Key",
            "headers.new1": SECRET,
            "retry.delays": "1, 5.5; 30",
            "breaker.enabled": "no",
            "body": '{"n": {{ payload.n | tojson }},\r\n "m": 1}',
        },
        "route": {"endpoint": "sink", "event_type": "user.*", "filter": " payload.n > 1 "},
    }[kind]
    expected: dict[str, Any] = {
        "source": {"secrets": ["hidden:1"], "rate": 2.5, "burst": 7},
        "endpoint": {
            "url": "http://127.0.0.1:9/x",
            "rate": 5.0,
            "headers": {"X-Key": "hidden"},
            "retry": {"delays": [1.0, 5.5, 30.0]},
            "breaker": {"enabled": False},
            "body": '{"n": {{ payload.n | tojson }},\n "m": 1}',
        },
        "route": {"endpoint": "sink", "event_type": "user.*", "filter": "payload.n > 1"},
    }[kind]
    browser, name = administrator(shared_api), unique()
    page = browser.get(f"/console/{kind}s")
    assert f"/console/{kind}s/-/new" in page.links()
    rows = audited(shared_api)
    seen = browser.submit(browser.get(f"/console/{kind}s/-/new"), "/-/new", name=name, do="save", reason="as asked", **given)
    assert seen.address == f"/console/{kind}s/{name}", seen.text
    assert of(shared_api, kind, name) == {"name": name} | expected
    assert audited(shared_api) == rows + 1
    row = conn.execute("SELECT who, action, what, why FROM audit ORDER BY id DESC LIMIT 1").fetchone()
    assert row == ("admin", "create", f"{kind} {name}", "as asked")
    taken = browser.submit(browser.get(f"/console/{kind}s/-/new"), "/-/new", name=name, do="save", **given)
    assert (taken.status, "already" in wrong(taken, "name")) == (409, True)


def test_an_empty_secret_stays_and_a_new_one_replaces_its_own_place(shared_api: Api, conn: Connection) -> None:
    name = made(shared_api, "endpoint", **FULL["endpoint"] | {"secrets": ["secret-one", "secret-two", "secret-three"]})
    browser = administrator(shared_api)

    def kept() -> list[str]:
        ((found,),) = conn.execute("SELECT spec->'secrets' FROM endpoint WHERE name = %s", (name,))
        return list(found)

    before = kept()
    ticked = {"secrets.1.remove": "1", "secrets.3": "another-secret", "secrets.new1": "fourth-secret", "headers.1.remove": "1"}
    seen = browser.submit(edit(browser, "endpoint", name), "/edit", do="save", **ticked, **{"client_certificate.remove": "1"})
    assert "saved as version 2" in seen.root.one(id="done").text
    after = kept()
    assert len(after) == 3
    assert after[0] == before[1], "the second stays as it is sealed"
    assert not {after[1], after[2]} & {*before}
    found = of(shared_api, "endpoint", name)
    assert found["headers"] == {"X-From": "env:FROM_WHOM"}
    assert "client_certificate" not in found
    assert browser.submit(edit(browser, "endpoint", name), "/edit", do="save", url="http://127.0.0.1:9/y").status == 200
    assert kept() == after


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"url": "ftp://x/"}, "url", "http://"),
        ({"url": ""}, "url", "missing"),
        ({"rate": "fast"}, "rate", "number"),
        ({"rate": "-1"}, "rate", "between"),
        ({"burst": "1.5"}, "burst", "whole number"),
        ({"retry.delays": "1, soon"}, "retry-delays", "[1] must be a number"),
        ({"headers.new1.name": "Host", "headers.new1": "x"}, "headers-new1", "set by Madeira"),
        ({"headers.new2": "x"}, "headers-new2-name", "needed"),
        ({"headers.new2.name": "Authorization", "headers.new2": "x"}, "headers-new2-name", "already"),
        ({"secrets.new2": "whsec_no"}, "secrets-new2", "base64"),
        ({"secrets.1.remove": "1", "secrets.new1": "env:9"}, "secrets-new1", "environment variable"),
        ({"client_certificate.key": "no"}, "client_certificate-key", "PEM"),
        ({"success": "status =="}, "success", ""),
        ({"body": "{{ payload. }}"}, "body", ""),
        ({"breaker.enabled": "maybe"}, "breaker-enabled", "true or false"),
        ({"reason": "a\nb"}, "reason", "printable"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_told_beside_its_field_and_nothing_is_changed(
    shared_api: Api, given: dict[str, str], field: str, told: str
) -> None:
    name = made(shared_api, "endpoint", **FULL["endpoint"])
    before, rows = of(shared_api, "endpoint", name), audited(shared_api)
    browser = administrator(shared_api)
    seen = browser.submit(edit(browser, "endpoint", name), "/edit", **{"do": "save", "timeout": "7"} | given)
    assert seen.status == 422
    assert told in wrong(seen, field)
    assert wrong(seen, field)
    assert filled(seen.form("/edit"))["timeout"] == "7", "what was typed is still there"
    assert (of(shared_api, "endpoint", name), audited(shared_api)) == (before, rows)
    again = browser.submit(edit(browser, "endpoint", name), "/edit", **{"do": "try"} | given)
    assert wrong(again, field), "and a trial tells the same"


def test_a_secret_that_was_typed_is_not_shown_again_and_the_form_says_so(shared_api: Api) -> None:
    name = made(shared_api, "endpoint", **FULL["endpoint"])
    browser = administrator(shared_api)
    for do in ("save", "try"):
        typed = {"secrets.1": SECRET, "headers.1": SECRET, "headers.new1.name": "X-New", "headers.new1": SECRET, "rate": "x"}
        seen = browser.submit(edit(browser, "endpoint", name), "/edit", do=do, **typed)
        assert SECRET not in seen.reply.body.decode()
        assert all("type it again" in wrong(seen, field) for field in ("secrets-1", "headers-1", "headers-new1"))


def test_of_two_who_change_the_same_the_second_is_told_who_did_what_and_loses_nothing(shared_api: Api, conn: Connection) -> None:
    name = made(shared_api, "endpoint", url="http://127.0.0.1:9/x", rate=5, timeout=3, headers={"X-A": "1", "X-B": "2"})
    text, other = token(shared_api, Role.ADMIN)
    browser = administrator(shared_api)
    form = edit(browser, "endpoint", name)
    patched(shared_api, "endpoint", name, bearer(text), rate=7, concurrency=2, headers={"X-A": None})
    patched(shared_api, "endpoint", name, bearer(text), timeout=9)
    rows = audited(shared_api)
    mine = {"do": "save", "timeout": "4", "burst": "2", "headers.2.remove": "1"}
    seen = browser.submit(form, "/edit", **mine)
    assert seen.status == 412
    assert audited(shared_api) == rows
    told = seen.root.one(id="changed").text
    assert f"token {other}" in told
    for words in ("rate : 5 → 7", "timeout : 3 → 9", "theirs"):
        assert words in told
    fields_ = filled(seen.form("/edit"))
    assert [fields_[f] for f in ("rate", "concurrency", "timeout", "burst")] == ["7", "2", "4", "2"]
    assert "9" in wrong_note(seen, "timeout")
    again = browser.submit(seen, "/edit", do="save")
    assert again.address == f"/console/endpoints/{name}", again.text
    found = of(shared_api, "endpoint", name)
    assert [found[f] for f in ("rate", "concurrency", "timeout", "burst")] == [7.0, 2, 4.0, 2]
    assert found["headers"] == {"X-B": "hidden"}, "the tick beside another header took nothing away"


def wrong_note(seen: Seen, name: str) -> str:
    field = seen.root.one(id=f"f-{name}")
    (box,) = [e for e in seen.root.all("div", class_="field") if field in e.all()]
    return box.text


def test_a_form_of_what_was_removed_and_made_anew_does_not_overwrite_it(shared_api: Api) -> None:
    name = made(shared_api, "route", endpoint="sink")
    browser = administrator(shared_api)
    form, removal = edit(browser, "route", name), browser.get(f"/console/routes/{name}/remove")
    assert shared_api.request("DELETE", f"/v1/routes/{name}", headers=in_json(ADMIN)).status == 200
    gone = browser.submit(form, "/edit", do="save", event_type="x.*")
    assert gone.status == 404
    shared_api.request("POST", "/v1/routes", json.dumps({"name": name, "endpoint": "sink"}).encode(), in_json(ADMIN))
    assert browser.submit(form, "/edit", do="save", event_type="x.*").status == 412
    assert browser.submit(removal, "/remove").status == 412
    assert of(shared_api, "route", name) == {"name": name, "endpoint": "sink"}


def test_an_object_is_removed_when_nothing_needs_it_and_else_the_page_says_what_does(shared_api: Api, conn: Connection) -> None:
    name = made_endpoint(shared_api)
    route = made(shared_api, "route", endpoint=name)
    browser = administrator(shared_api)
    page = browser.get(f"/console/endpoints/{name}/remove")
    assert f"/console/routes/{route}" in page.links()
    refused = browser.submit(page, "/remove")
    assert (refused.status, route in refused.text) == (409, True)
    assert browser.submit(browser.get(f"/console/routes/{route}/remove"), "/remove").address == "/console/routes"
    [ref] = making.routed(conn, (name,))
    page = browser.get(f"/console/endpoints/{name}/remove")
    assert "1 delivery is unfinished" in page.text
    assert browser.submit(page, "/remove").status == 409
    assert browser.submit(page, "/remove", unfinished="cancel").status == 422, "that needs a reason"
    rows = audited(shared_api)
    done = browser.submit(page, "/remove", unfinished="cancel", reason="gone")
    assert "is removed. 1 delivery was cancelled." in done.root.one(id="done").text
    assert conn.execute("SELECT status FROM delivery WHERE id = %s", (ref.delivery_id,)).fetchone() == ("cancelled",)
    assert audited(shared_api) == rows + 1
    assert browser.get(f"/console/endpoints/{name}").status == 404


def test_a_route_is_tried_on_a_real_event_before_it_is_saved(shared_api: Api) -> None:
    kind = f"trial.{unique()}"
    event_id = uuid.uuid4().hex
    assert shared_api.post(event(event_id, event_type=kind, payload={"n": 3})).status == 202
    name, endpoint = unique(), made_endpoint(shared_api, headers={"X-Secret": SECRET}, success="body.ok == true")
    browser, rows = administrator(shared_api), audited(shared_api)
    page = browser.get("/console/routes/-/new")
    assert filled(page.form("/-/new"))["try.event"] == f"shop/{event_id}", "the newest is chosen"
    given = {"do": "try", "name": name, "endpoint": endpoint, "event_type": kind, "filter": "payload.n > 5"}
    no = browser.submit(page, "/-/new", **given)
    assert "does not match" in no.text
    assert "filter" in no.text
    yes = browser.submit(
        no, "/-/new", **{"do": "try", "filter": "payload.n > 2", "try.status": "200", "try.answer": '{"ok": false}'}
    )
    assert "matches" in yes.text
    assert "POST http://127.0.0.1:9/x" in yes.text
    assert SECRET not in yes.reply.body.decode()
    verdict = yes.root.one(id="verdict").text
    assert "tried again" in verdict or "dead" in verdict
    good = browser.submit(yes, "/-/new", **{"do": "try", "try.answer": '{"ok": true}'})
    assert "succeeded" in good.root.one(id="verdict").text
    assert audited(shared_api) == rows
    assert shared_api.get(f"/v1/routes/{name}", admin=True).status == 404, "nothing was saved"
    saved = browser.submit(good, "/-/new", do="save")
    assert saved.address == f"/console/routes/{name}"


def test_an_endpoint_shows_the_request_that_would_go_out_also_when_nothing_leads_to_it(shared_api: Api) -> None:
    shared_api.post(event(uuid.uuid4().hex, payload={"n": 41}))
    name = made_endpoint(shared_api)
    browser = administrator(shared_api)
    page = edit(browser, "endpoint", name)
    assert "No route leads to it yet" in page.text
    assert "POST http://127.0.0.1:9/x" in page.text
    tried = browser.submit(page, "/edit", do="try", method="PUT", body='{"only": {{ payload.n | tojson }}}')
    assert "PUT http://127.0.0.1:9/x" in tried.text
    assert '{"only": 41}' in tried.text.replace('{"only":41}', '{"only": 41}')
    assert of(shared_api, "endpoint", name)["url"] == "http://127.0.0.1:9/x"
    assert "method" not in of(shared_api, "endpoint", name)
    broken = browser.submit(page, "/edit", **{"do": "try", "try.event": "shop/nothing"})
    assert "cannot be tried" in broken.text


def test_the_history_tells_each_change_field_by_field_without_secrets(shared_api: Api) -> None:
    name = made(shared_api, "endpoint", url="http://127.0.0.1:9/x", secrets=["secret-one"], retry={"max": 100})
    patched(shared_api, "endpoint", name, rate=7, secrets=[SECRET], retry={"max": 200})
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/endpoints/{name}")
    row = seen.root.one("tbody").all("tr")[0].text
    for words in (
        "update",
        "theirs",
        "rate : nothing → 7",
        "retry.max : 100 → 200",
        "secrets : not shown → another one, not shown",
    ):
        assert words in row
    assert SECRET not in seen.reply.body.decode()


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
def test_only_an_administrator_is_offered_changes_and_can_make_them(shared_api: Api, role: Role) -> None:
    name = made(shared_api, "route", endpoint="sink")
    form = edit(administrator(shared_api), "route", name)
    browser = somebody(shared_api, role)
    shown = browser.get(f"/console/routes/{name}")
    assert not [link for link in shown.links() if link.endswith(("/edit", "/remove", "/new"))]
    for address in (f"/console/routes/{name}/edit", f"/console/routes/{name}/remove", "/console/routes/-/new"):
        assert browser.get(address).status == 403
        own = filled(browser.get("/console").form("/sign-out"))
        values = filled(form.form("/edit")) | own | {"do": "save", "event_type": "x.*"}
        assert browser.post(address, values).status == 403
    assert of(shared_api, "route", name) == {"name": name, "endpoint": "sink"}


def test_what_is_built_in_has_no_form(shared_api: Api) -> None:
    browser = administrator(shared_api)
    for page in ("edit", "remove"):
        assert browser.get(f"/console/endpoints/callback/{page}").status == 409
        assert browser.get(f"/console/endpoints/nothing/{page}").status == 404


def test_a_hostile_value_is_text_in_its_form(shared_api: Api) -> None:
    name = made(shared_api, "route", endpoint="sink", routing_key=HOSTILE[:200], filter=f"payload.x == {json.dumps(HOSTILE)}")
    browser = administrator(shared_api)
    seen = edit(browser, "route", name)
    assert b"<img" not in seen.reply.body
    assert len(seen.root.all("script")) == 1
    back = browser.submit(seen, "/edit", **{"do": "save", "name": HOSTILE, "event_type": HOSTILE, "try.event": HOSTILE})
    assert back.status == 422
    assert b"<img" not in back.reply.body


def test_a_number_is_read_as_one_writes_it() -> None:
    assert [fields.number(text) for text in ("5", "+5", "0.5", "1e3", "007")] == [5, 5, 0.5, 1000.0, 7]
    assert all(fields.number(text) == text for text in ("1_000", "0,5", "nan", "1.2.3", "٣", "0x10", "1e9999"))
