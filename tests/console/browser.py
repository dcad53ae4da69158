"""A browser without a screen: keeps cookies, follows redirects, fills in forms, and reads pages by the parser of the library."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from urllib.parse import parse_qsl, urldefrag, urlencode, urljoin, urlsplit

from madeira.states import Role
from tests.api.people import token
from tests.api.serving import ADMIN_TOKEN, Api, Reply

VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"})


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What one reads, with single spaces."""
        return re.sub(r"\s+", " ", "".join(self._texts())).strip()

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield child
            else:
                yield " "
                yield from child._texts()
                yield " "

    def all(self, tag: str | None = None, **attributes: str) -> list["Element"]:
        """The elements within, by tag and attributes (``class_`` is one class of several)."""
        return [e for e in self._within() if (tag is None or e.tag == tag) and e.matches(attributes)]

    def one(self, tag: str | None = None, **attributes: str) -> "Element":
        found = self.all(tag, **attributes)
        assert len(found) == 1, f"{len(found)} of {tag} {attributes} in: {self.text}"
        return found[0]

    def matches(self, wanted: Mapping[str, str]) -> bool:
        for name, value in wanted.items():
            if name == "class_":
                if value not in self.attributes.get("class", "").split():
                    return False
            elif self.attributes.get(name.replace("_", "-")) != value:
                return False
        return True

    def _within(self) -> Iterator["Element"]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child._within()


class _Tree(HTMLParser):
    """Makes a tree of a page that is well-formed; complains about one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>, line {self.getpos()}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def end(self) -> Element:
        self.close()
        assert self._open == [self.root], f"<{self._open[-1].tag}> is not closed"
        return self.root


def parse(html: bytes) -> Element:
    """The tree of a page."""
    tree = _Tree()
    tree.feed(html.decode())
    return tree.end()


@dataclass
class Seen:
    """A page, and how one got it."""

    reply: Reply
    address: str
    root: Element

    @property
    def status(self) -> int:
        return self.reply.status

    @property
    def text(self) -> str:
        return self.root.one("main").text

    @property
    def title(self) -> str:
        return self.root.one("h1").text

    def form(self, action_ends_with: str) -> Element:
        """The form that posts to an address that ends (before its query) with this."""
        forms = self.root.all("form")
        found = [f for f in forms if urlsplit(f.attributes.get("action", "")).path.endswith(action_ends_with)]
        assert len(found) == 1, f"{len(found)} forms to {action_ends_with} in: {self.text}"
        return found[0]

    def links(self) -> list[str]:
        return [a.attributes["href"] for a in self.root.all("a") if "href" in a.attributes]


class Browser:
    """Somebody who looks at the console."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.cookies: dict[str, str] = {}

    def ask(
        self, method: str, address: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request; redirects are for the caller."""
        sent = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())} if self.cookies else {}
        body = None
        if form is not None:
            body = urlencode(form).encode()
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        reply = self.api.request(method, address, body, sent | dict(headers or {}))
        self._keep(reply)
        return reply

    def get(self, address: str, **headers: str) -> Seen:
        """Open a page."""
        return self._follow(self.ask("GET", address, headers=headers), address)

    def post(self, address: str, form: Mapping[str, str], **headers: str) -> Seen:
        """Post a form, and see what comes of it."""
        return self._follow(self.ask("POST", address, form, headers), address)

    def submit(self, page: Seen, action_ends_with: str, **values: str) -> Seen:
        """Fill in a form of a page and send it."""
        form = page.form(action_ends_with)
        return self.post(urldefrag(urljoin(page.address, form.attributes["action"])).url, filled(form) | values)

    def sign_in(self, text: str, address: str = "/console/sign-in") -> Seen:
        """Sign in with a token."""
        return self.submit(self.get(address), "/sign-in", token=text)

    def _follow(self, reply: Reply, address: str) -> Seen:
        hops = 0
        while reply.status == 303:
            hops += 1
            assert hops < 5, f"redirected in a circle at {address}"
            address = urljoin(address, reply.headers["location"])
            reply = self.ask("GET", address)
        return Seen(reply, address, parse(reply.body))

    def _keep(self, reply: Reply) -> None:
        for line in reply.cookies:
            for name, morsel in SimpleCookie(line).items():
                if morsel["max-age"] == "0" or "1970" in morsel["expires"] or not morsel.value:
                    self.cookies.pop(name, None)
                else:
                    self.cookies[name] = morsel.value


def filled(form: Element) -> dict[str, str]:
    """The fields of a form as they are before anybody types."""
    fields = {f.attributes["name"]: f.attributes.get("value", "") for f in form.all("input") if "name" in f.attributes}
    fields = {n: v for n, v in fields.items() if not any(f.matches({"name": n, "type": "checkbox"}) for f in form.all("input"))}
    # A line break right behind the tag is none of the text.
    fields |= {f.attributes["name"]: "".join(map(str, f.children)).removeprefix("\n") for f in form.all("textarea")}
    for select in form.all("select"):
        options = select.all("option")
        chosen = next((o for o in options if "selected" in o.attributes), options[0])
        fields[select.attributes["name"]] = chosen.attributes.get("value", chosen.text)
    return fields


def queried(address: str) -> dict[str, str]:
    """What the query of an address asks for."""
    return dict(parse_qsl(address.partition("?")[2]))


def somebody(api: Api, role: Role) -> Browser:
    """Somebody who has signed in with a new token of this role."""
    browser = Browser(api)
    seen = browser.sign_in(token(api, role)[0])
    assert seen.status == 200, seen.text
    return browser


def administrator(api: Api) -> Browser:
    """Who has signed in with the token of the settings."""
    browser = Browser(api)
    assert browser.sign_in(ADMIN_TOKEN).status == 200
    return browser
