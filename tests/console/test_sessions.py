"""Who gets in, for how long, and who cannot post in somebody else's name."""

import json
import time
from collections.abc import Callable

import pytest

from madeira.api.known_tokens import KnownTokens
from madeira.console.session import LIFE_S, Notice, Sessions
from madeira.sealing import PREFIX, Sealer
from madeira.states import Role
from tests.api.people import ADMIN, audited, token
from tests.api.serving import ADMIN_TOKEN, Api
from tests.console.browser import Browser, administrator, filled, somebody
from tests.system.harness import KEY, wait_until


class Nobody:
    """Where nobody needs to be asked."""

    def person(self, *_: object) -> None:
        return None

    held = find = person


def sessions(*, now: Callable[[], float] = time.time, key: str = KEY, admin_token: str = ADMIN_TOKEN) -> Sessions:
    nobody: KnownTokens = Nobody()  # type: ignore[assignment]
    return Sessions(sealer=Sealer((key,)), auth=nobody, tokens=nobody, admin_token=admin_token, now=now)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", list(Role))
def test_a_token_lets_in_and_the_page_says_as_whom(shared_api: Api, role: Role) -> None:
    text, name = token(shared_api, role)
    seen = Browser(shared_api).sign_in(text)
    assert (seen.status, seen.address) == (200, "/console")
    assert f"token {name} · {role}" in seen.root.one("header").text


def test_the_administrator_of_the_settings_may_sign_in(shared_api: Api) -> None:
    assert "admin · admin" in administrator(shared_api).get("/console").root.one("header").text


@pytest.mark.parametrize("text", ["", "wrong", "mdr_000000000000_" + "a" * 43, ADMIN_TOKEN + "x", "ü", "a\nb", "x" * 5000])
def test_what_is_no_token_that_holds_is_refused_in_words(shared_api: Api, text: str) -> None:
    browser = Browser(shared_api)
    seen = browser.sign_in(text)
    assert seen.status == 403
    assert "does not hold" in seen.root.one("p", role="alert").text
    assert "madeira_console" not in browser.cookies


def test_the_cookie_is_not_for_scripts_or_other_sites_and_does_not_hold_the_token(shared_api: Api) -> None:
    browser = Browser(shared_api)
    page = browser.get("/console/sign-in")
    text, _ = token(shared_api, Role.VIEWER)
    reply = browser.ask("POST", "/console/sign-in", filled(page.form("/sign-in")) | {"token": text})
    (line,) = [line for line in reply.cookies if line.startswith("madeira_console=")]
    assert {"HttpOnly", "SameSite=Strict", "Path=/console", f"Max-Age={LIFE_S}"} <= set(line.split("; "))
    assert "Secure" not in line
    assert text.split("_", 2)[2] not in line
    again = browser.get("/console/sign-in")
    reply = browser.ask(
        "POST", "/console/sign-in", filled(again.form("/sign-in")) | {"token": text}, {"X-Forwarded-Proto": "https"}
    )
    assert all("Secure" in line for line in reply.cookies if line.startswith("madeira_console="))


def test_the_cookie_is_nothing_to_the_api(shared_api: Api) -> None:
    browser = administrator(shared_api)
    assert browser.ask("GET", "/v1/events").status == 401


def test_whoever_is_not_signed_in_comes_back_to_the_page_afterwards(shared_api: Api) -> None:
    browser = Browser(shared_api)
    page = browser.get("/console/audit?who=admin&action=pause")
    assert page.title == "Sign in"
    seen = browser.submit(page, "/sign-in", token=ADMIN_TOKEN)
    assert seen.address == "/console/audit?who=admin&action=pause"


@pytest.mark.parametrize(
    "onward",
    ["https://evil.example/", "//evil.example/console", "/console//evil.example", "/consolex", "/console/\\evil", "/\\evil",
     "javascript:alert(1)", "/console/\r\nSet-Cookie: a=b", "/v1/events", "/console/é",
     "/console/../v1/events", "/console/..", "/console/a/../../../v1/events?x=1", "/console/%2e%2E/v1/events",
     "/console/./audit"],
)  # fmt: skip
def test_nobody_is_sent_on_to_what_is_no_page_of_the_console(shared_api: Api, onward: str) -> None:
    browser = Browser(shared_api)
    page = browser.get("/console/sign-in")
    reply = browser.ask("POST", "/console/sign-in", filled(page.form("/sign-in")) | {"token": ADMIN_TOKEN, "next": onward})
    assert (reply.status, reply.headers["location"]) == (303, "/console")


def test_a_link_from_a_chat_asks_once_more_from_our_own_page_instead_of_asking_for_a_token(shared_api: Api) -> None:
    """A browser keeps a strict cookie back on the way from another site."""
    seen = Browser(shared_api).get("/console/audit?who=a%20b", **{"Sec-Fetch-Site": "cross-site"})
    refresh = seen.root.one("meta", http_equiv="refresh").attributes["content"]
    assert refresh == "0; url=/console/audit?who=a%20b"
    assert Browser(shared_api).get("/console/audit", **{"Sec-Fetch-Site": "same-origin"}).title == "Sign in"


def test_signing_out_ends_the_session_in_this_browser(shared_api: Api) -> None:
    browser = administrator(shared_api)
    assert browser.submit(browser.get("/console"), "/sign-out").title == "Sign in"
    assert browser.get("/console").title == "Sign in"


def test_a_revoked_token_ends_its_sessions(shared_api: Api) -> None:
    """As soon as it counts no more itself, of which the tests of tokens tell the time."""
    text, name = token(shared_api, Role.ADMIN)
    browser = Browser(shared_api)
    browser.sign_in(text)
    assert shared_api.request("DELETE", f"/v1/tokens/{name}", None, ADMIN).status == 200
    wait_until(lambda: browser.get("/console").title == "Sign in", what="the session to end")


def test_a_token_of_the_same_name_does_not_take_a_session_over(shared_api: Api) -> None:
    text, name = token(shared_api, Role.ADMIN)
    browser = Browser(shared_api)
    browser.sign_in(text)
    shared_api.request("DELETE", f"/v1/tokens/{name}", None, ADMIN)
    token(shared_api, Role.VIEWER, name=name)
    wait_until(lambda: browser.get("/console").title == "Sign in", what="the session to end")


def test_a_session_ends_when_its_time_is_up_or_the_token_of_the_settings_is_another() -> None:
    clock = [1000.0]
    cookie = sessions(now=lambda: clock[0]).begin(ADMIN_TOKEN)
    found = sessions(now=lambda: clock[0]).read(cookie)
    assert found is not None
    assert (found.who, found.role) == ("admin", Role.ADMIN)
    assert sessions(now=lambda: clock[0], admin_token="another").read(cookie) is None
    assert sessions(now=lambda: clock[0], admin_token="").read(cookie) is None
    clock[0] += LIFE_S - 1
    assert sessions(now=lambda: clock[0]).read(cookie) is not None
    clock[0] += 2
    assert sessions(now=lambda: clock[0]).read(cookie) is None


def test_only_what_was_sealed_as_a_session_is_one() -> None:
    """Not a notice, not another secret sealed with the same key, not with another key, not altered."""
    ours = sessions()
    good = ours.begin(ADMIN_TOKEN)
    assert good is not None
    forged = json.dumps({"kind": "session", "until": time.time() + 60, "handle": "", "mark": "x", "csrf": "y"})
    bad = [
        ours.note(Notice("t", "/console")),
        Sealer((KEY,)).seal("a secret of an endpoint").removeprefix(PREFIX),
        Sealer((KEY,)).seal("[]").removeprefix(PREFIX),
        Sealer((KEY,)).seal(forged).removeprefix(PREFIX),
        Sealer(("YW5vdGhlci1rZXktb2YtdGhlLXRlc3RzLXRoaXMtb24=",)).seal(forged).removeprefix(PREFIX),
        good[:-4] + ("aaaa" if good[-4:] != "aaaa" else "bbbb"),
        "",
        "x",
        "é",
        good * 50,
        None,
    ]
    assert [ours.read(cookie) for cookie in bad] == [None] * len(bad)
    assert ours.noted(good) is None


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}],
)
def test_a_post_from_another_site_does_nothing(shared_api: Api, headers: dict[str, str]) -> None:
    browser = administrator(shared_api)
    form = filled(browser.get("/console").form("/sign-out"))
    before = audited(shared_api)
    assert browser.post("/console/sign-out", form, **headers).status == 403
    assert browser.post("/console/sign-in", {"token": ADMIN_TOKEN}, **headers).status == 403
    assert audited(shared_api) == before
    assert browser.get("/console").status == 200


@pytest.mark.parametrize("csrf", [None, "", "wrong"])
def test_a_form_that_is_not_of_this_session_does_nothing(shared_api: Api, csrf: str | None) -> None:
    browser, other = administrator(shared_api), administrator(shared_api)
    given = filled(other.get("/console").form("/sign-out"))["csrf"]
    for value in (csrf, given):
        form = {} if value is None else {"csrf": value}
        seen = browser.post("/console/sign-out", form)
        assert seen.status == 403
        assert "not of this session" in seen.text
    assert browser.get("/console").title != "Sign in"


def test_signing_in_needs_the_form_that_this_browser_got(shared_api: Api) -> None:
    """Or another site could sign somebody in as somebody else."""
    form = filled(Browser(shared_api).get("/console/sign-in").form("/sign-in"))
    reply = Browser(shared_api).ask("POST", "/console/sign-in", form | {"token": ADMIN_TOKEN})
    assert reply.status == 403
    assert not any(line.startswith("madeira_console=") for line in reply.cookies)


def test_a_form_of_an_ended_session_leads_to_sign_in_and_back_to_its_page(shared_api: Api) -> None:
    browser = administrator(shared_api)
    del browser.cookies["madeira_console"]
    before = audited(shared_api)
    seen = browser.post("/console/endpoints/sink/pause", {"csrf": "old", "reason": "x"})
    assert seen.title == "Sign in"
    assert filled(seen.form("/sign-in"))["next"] == "/console/endpoints/sink"
    assert audited(shared_api) == before


def test_every_answer_carries_the_headers_that_keep_a_page_harmless(shared_api: Api) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    for address in ("/console", "/console/sign-in", "/console/nothing", "/console/events/x"):
        reply = browser.ask("GET", address)
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "same-origin"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["content-type"] == "text/html; charset=utf-8"


def test_the_style_and_the_script_are_ours_and_kept_for_good(shared_api: Api) -> None:
    page = Browser(shared_api).get("/console/sign-in").root
    addresses = [e.attributes["href"] for e in page.all("link")] + [e.attributes["src"] for e in page.all("script")]
    assert len(addresses) == 3
    for address in addresses:
        assert address.startswith("/console/static/")
        reply = shared_api.request("GET", address)
        assert (reply.status, reply.headers["cache-control"]) == (200, "public, max-age=31536000, immutable")
    assert shared_api.request("GET", "/console/static/console.css").status == 404
    assert shared_api.request("GET", "/console/static/..%2Fapp.py").status in (303, 404)


def test_without_a_key_nobody_can_sign_in_and_the_page_says_what_to_do(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    api = serve(database_url, redis_url, config=None, MADEIRA_SECRET_KEY="").start()
    seen = Browser(api).sign_in(ADMIN_TOKEN)
    assert seen.title == "Sign in"
    assert "MADEIRA_SECRET_KEY" in seen.root.one("p", role="alert").text


def test_what_is_not_there_is_told_in_words(shared_api: Api) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    assert browser.get("/console/nothing").status == 404
    assert "no page at this address" in browser.get("/console/nothing").text
    assert browser.ask("DELETE", "/console").status == 405
    for odd in ("/console/%ff", "/console/events/%ff?source=%ff", "/console/events?q=%ff", "/console/events/x?source=%00"):
        assert browser.get(odd).status in (404, 422, 200), odd
        assert Browser(shared_api).get(odd).title == "Sign in"
    assert browser.ask("POST", "/console/sign-in", {"a": "b" * 40_000}).status == 413
