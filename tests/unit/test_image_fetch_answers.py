"""What an image server may answer, at which length and pace: the limits of a request bound it."""

from __future__ import annotations

import time

import pytest

from kit.listener import Listener, whole
from shim.guards.request_forgery import image_fetch
from shim.guards.request_forgery.image_fetch import Allowance, CannotFetch, parse

pytestmark = pytest.mark.usefixtures("names")


def fetch(url, *, public=True, allowance=None):
    return image_fetch.fetch(parse(url), allowance or Allowance(), public=public)


def slowly(*pieces):
    for piece in pieces:
        yield piece
        time.sleep(0.05)


def trickle(first, piece=b"x"):
    yield first
    while True:
        time.sleep(0.05)
        yield piece


def endless(first, piece=b"x" * 65536):
    yield first
    while True:
        yield piece


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
TOO_LARGE = {
    "without end": lambda path: endless(OK + b"\r\n"),
    "without end in chunks": lambda path: endless(CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "one chunk of a tebibyte": lambda path: endless(CHUNKED + b"10000000000\r\n"),
    "trailers without end": lambda path: endless(CHUNKED + b"1\r\nx\r\n0\r\n", b"a: b\r\n" * 10000),
    "interim answers without end": lambda path: endless(
        b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000
    ),
    "the length says so": lambda path: OK + b"Content-Length: 9999999999999\r\n\r\n",
}
SLOW = {
    "body": lambda path: trickle(OK + b"\r\n"),
    "body of a length": lambda path: trickle(OK + b"Content-Length: 1000\r\n\r\n"),
    "chunks": lambda path: trickle(CHUNKED, b"1\r\nx\r\n"),
    "headers": lambda path: trickle(OK + b"A: "),
    "status line": lambda path: trickle(b"HTTP/1.1"),
    "nothing at all": lambda path: slowly(*[b""] * 60),
}
BAD = {
    "shorter than its length": OK + b"Content-Length: 1000\r\n\r\nshort",
    "a chunk cut short": CHUNKED + b"ff\r\nshort",
    "no HTTP": b"\x00\x01\x02\r\n\r\n",
    "nothing": b"",
    "a status line cut short": b"HTTP/1",
    "a chunk of no size": CHUNKED + b"zz\r\nx",
    "too many headers": OK + b"A: b\r\n" * 200 + b"\r\n",
    "a header too long": OK + b"A: " + b"b" * 70000 + b"\r\n\r\n",
    "not found": whole(b"", status="404 Not Found"),
    "no content": whole(b"", status="204 No Content"),
    "partial": whole(b"x", status="206 Partial Content"),
    "not modified": whole(b"", status="304 Not Modified"),
    "use proxy": whole(b"", "Location: http://127.0.0.1:1/", status="305 Use Proxy"),
    "an error": whole(b"x", status="500 Oops"),
}


@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("how", TOO_LARGE)
def test_what_is_too_large_is_cut(one_public, how, public):
    with Listener(TOO_LARGE[how]) as listener, pytest.raises(CannotFetch, match="is too large"):
        fetch(listener.url(), public=public)


@pytest.mark.parametrize("how", SLOW)
def test_the_time_is_that_of_the_whole(one_public, monkeypatch, how):
    monkeypatch.setattr(image_fetch, "MAX_SECONDS", 0.5)
    before = time.monotonic()
    with Listener(SLOW[how]) as listener, pytest.raises(CannotFetch, match="took too long"):
        fetch(listener.url())
    assert 0.4 < time.monotonic() - before < 20


@pytest.mark.parametrize("how", BAD)
def test_what_is_no_whole_answer_is_said(one_public, how):
    with (
        Listener(lambda path: BAD[how]) as listener,
        pytest.raises(CannotFetch, match=r"could not be fetched|was answered"),
    ):
        fetch(listener.url())


def test_time_and_bytes_are_shared_by_the_images_of_a_request(one_public):
    allowance = Allowance()
    with Listener(lambda path: whole(b"x" * 400_000)) as listener:
        for _ in range(2):
            assert len(fetch(listener.url(), allowance=allowance)[1]) == 400_000
        with pytest.raises(CannotFetch, match="too large"):
            fetch(listener.url(), allowance=allowance)
        allowance._end = time.monotonic()
        before = listener.connections
        with pytest.raises(CannotFetch, match="too long"):
            fetch(listener.url(), allowance=allowance)
        assert listener.connections == before


def test_bodies_of_all_kinds(one_public):
    body = bytes(range(256)) * 1000
    chunks = (
        b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (body[:1], body[1:9000], body[9000:]))
        + b"0\r\n\r\n"
    )
    replies = {
        "/length": whole(body, kind="image/webp; a=b"),
        "/chunked": OK + b"Content-Type: IMAGE/JPEG\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        "/until-it-closes": OK + b"\r\n" + body,
        "/http-1.0": b"HTTP/1.0 200 OK\r\n\r\n" + body,
        "/interim": b"HTTP/1.1 100 Continue\r\n\r\n" + whole(body),
    }
    with Listener(replies.get) as listener:
        assert {path: fetch(listener.url(path)) for path in replies} == {
            "/length": ("image/webp", body),
            "/chunked": ("image/jpeg", body),
            "/until-it-closes": ("text/plain", body),
            "/http-1.0": ("text/plain", body),
            "/interim": ("image/png", body),
        }
