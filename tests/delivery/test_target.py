"""Which URLs can be called."""

import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from madeira import target
from madeira.target import BadUrl

GOOD = {
    "http://a.test": ("a.test", 80, "a.test", "/"),
    "HTTP://A.Test/": ("a.test", 80, "a.test", "/"),
    "https://a.test:443/x?y=1&z=%20#frag": ("a.test", 443, "a.test", "/x?y=1&z=%20"),
    "https://a.test:8443/x": ("a.test", 8443, "a.test:8443", "/x"),
    "http://a.test:080/x": ("a.test", 80, "a.test", "/x"),
    "http://127.0.0.1:65535/": ("127.0.0.1", 65535, "127.0.0.1:65535", "/"),
    "http://[::1]:81/x": ("::1", 81, "[::1]:81", "/x"),
    "http://[2001:DB8:0::1]/": ("2001:db8::1", 80, "[2001:db8::1]", "/"),
    "http://b\u00fccher.example/\u00fc?q=\u00fc": ("xn--bcher-kva.example", 80, "xn--bcher-kva.example", "/%C3%BC?q=%C3%BC"),
    "http://xn--bcher-kva.example/": ("xn--bcher-kva.example", 80, "xn--bcher-kva.example", "/"),
    "http://my_service.internal./": ("my_service.internal.", 80, "my_service.internal.", "/"),
    f"http://{'a' * 63}.test/": (f"{'a' * 63}.test", 80, f"{'a' * 63}.test", "/"),
    "http://a.test/%7B%7D/%": ("a.test", 80, "a.test", "/%7B%7D/%"),
    "http://a.test?x": ("a.test", 80, "a.test", "/?x"),
}


@pytest.mark.parametrize("url", GOOD)
def test_a_good_url_is_taken_apart(url):
    """Host, port, Host header and path of URLs that can be called."""
    t = target.parse(url)
    assert (t.host, t.port, t.authority, t.path) == GOOD[url]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.test",
        "/path",
        "//a.test/",
        "ftp://a.test/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "{+target_uri}",
        "http://",
        "http:///x",
        "http://:80/",
        "http://a.test:",
        "http://a.test:0/",
        "http://a.test:99999/",
        "http://a.test:-1/",
        "http://a.test:x/",
        "http://a.test:8 0/",
        "http://xn--/",
        "http://xn--a.test.xn--/",
        "http://\u2460\u2461\u2466.0.0.1/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.0.0.1/",
        "http://0x7f000001/",
        "http://127.0.0.256/",
        "http://0177.0.0.1/",
        "http://a.1/",
        "http://a b/",
        "http://a.test/a b",
        "http://a.test\r\n/",
        "http://x\r\ny/",
        "http://a.test/\r\nHost: b",
        "http://a.test/\x00",
        "http://a.test/\u2028",
        "http://a.test/\u200b",
        "http://a.test\\@b.test/",
        "http://a..test/",
        "http://.test/",
        "http://-a.test/",
        "http://a-.test/",
        "http://a,b/",
        "http://a%20b/",
        "http://a|b/",
        f"http://{'a' * 64}.test/",
        f"http://{'a' * 300}/",
        f"http://{'.'.join(['a' * 60] * 5)}/",
        "http://[::1/",
        "http://[::g]/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://\ud800/",
        "http://a.test/" + "x" * 9000,
    ],
    ids=ascii,
)
def test_an_impossible_url_is_refused_with_a_reason(url):
    """Nothing but BadUrl comes out, whatever the URL is."""
    with pytest.raises(BadUrl, match="the URL"):
        target.parse(url)


@given(st.text(max_size=60).map("http://".__add__) | st.text(max_size=60))
@example("http://[")
@example("http://[v1.x]/")
@example("http://a@b@c/")
@example("http://\u0130/")
def test_parsing_ends_in_a_target_or_in_bad_url(url):
    """No text makes it raise anything else, and what it lets through is plain ASCII without line breaks."""
    try:
        t = target.parse(url)
    except BadUrl:
        return
    for text in (t.host, t.authority, t.path, t.url):
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text


@given(
    st.text("0123456789abcdefxX.-_", max_size=40)
    | st.from_regex(r"((0[xX])?[0-9a-f]{1,9}\.){0,4}(0[xX])?[0-9]{1,11}\.?", fullmatch=True)
)
@example("127.1")
@example("0x7f000001")
@example("1.2.3.4")
def test_no_host_but_an_address_in_its_usual_form_is_taken_for_one_by_the_system(host):
    """What is parsed as a name is one for the C library too, which knows numbers in octal, in hex, and with parts left out."""
    try:
        parsed = target.parse(f"http://{host}/").host
    except BadUrl:
        return
    try:
        packed = socket.inet_aton(parsed)
    except OSError:
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(parsed, 80, flags=socket.AI_NUMERICHOST)
    else:
        assert socket.inet_ntoa(packed) == parsed == host


def test_user_and_password_become_a_header_and_leave_the_url():
    """What is logged does not hold them, nor does the repr."""
    t = target.parse("https://us%65r:p%40ss@a.test/x")
    assert t.authorization == "Basic dXNlcjpwQHNz"
    assert t.url == "https://a.test/x"
    assert "p@ss" not in repr(t)
    assert "dXNlcjpwQHNz" not in repr(t)


@pytest.mark.parametrize(("url", "end"), [("nonsense", ""), ("//a.test/", ""), ("ftp://a.test/", ", not ftp:")])
def test_a_url_without_http_is_told_how_to_begin(url, end):
    with pytest.raises(BadUrl) as caught:
        target.parse(url)
    assert str(caught.value) == f"the URL must begin with http:// or https://{end}"


def test_bad_url_does_not_tell_the_password():
    """An error about a URL with a password is silent about it."""
    with pytest.raises(BadUrl) as caught:
        target.parse("https://user:hunter2@a b/")
    assert "hunter2" not in str(caught.value)
