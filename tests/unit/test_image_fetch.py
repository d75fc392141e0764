"""Which images are fetched, and from where, over real sockets on loopback.

No resolver is asked: the tests give the addresses of names.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import time

import pytest

from kit.listener import Listener, redirect, whole
from shim.guards.request_forgery import image_fetch
from shim.guards.request_forgery.image_fetch import Allowance, CannotFetch, parse

pytestmark = pytest.mark.usefixtures("names")


def fetch(url, *, public=True, allowance=None):
    return image_fetch.fetch(parse(url), allowance or Allowance(), public=public)


DISGUISES = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "017700000001",
    "0",
    "0.0.0.0",
    "localhost",
    "LOCALHOST",
    "127.0.0.1.",
    "inside.test",
    "inside.test.",
    "both.test",
    "mapped.test",
    "\uff11\uff12\uff17.0.0.1",
]
DISGUISES_6 = [
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[0:0:0:0:0:0:0:1]",
    "[64:ff9b::7f00:1]",
]


@pytest.mark.parametrize("host", [*DISGUISES, *DISGUISES_6])
def test_nothing_inside_is_contacted(names, host):
    names |= {
        "inside.test": [["127.0.0.1"]],
        "inside.test.": [["127.0.0.1"]],
        "both.test": [["93.184.216.34", "127.0.0.1"]],
        "mapped.test": [["::ffff:127.0.0.1"]],
    }
    with Listener() as listener:
        with pytest.raises(CannotFetch):
            fetch(listener.url(host=host))
        time.sleep(0.02)
        assert listener.connections == 0


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "localhost", "inside.test", "both.test"]
)
def test_any_address_is_contacted_where_that_is_wanted(names, host):
    names |= {"inside.test": [["127.0.0.1"]], "both.test": [["127.0.0.1", "93.184.216.34"]]}
    with Listener() as listener:
        assert fetch(listener.url("/a?b=c#d", host), public=False) == ("image/png", b"a picture")
        assert listener.heads[0].startswith(
            f"GET /a?b=c HTTP/1.1\r\nHost: {host}:{listener.port}\r\n"
        )
        assert "gzip" not in listener.heads[0]


@pytest.mark.parametrize("host", ["::1"])
def test_ipv6(host):
    with Listener(host=host) as listener:
        with pytest.raises(CannotFetch, match="not at a public address"):
            fetch(listener.url(host=f"[{host}]"))
        assert listener.connections == 0
        assert fetch(listener.url(host=f"[{host}]"), public=False)[1] == b"a picture"
        assert f"\r\nHost: [{host}]:{listener.port}\r\n" in listener.heads[0]


def test_a_name_without_an_address_and_one_that_leads_inside_are_told_alike(names):
    names |= {"none.test": [[]], "inside.test": [["10.0.0.1"]]}
    told = set()
    for host in names:
        with pytest.raises(CannotFetch) as refused:
            fetch(f"http://{host}/")
        told.add(str(refused.value))
    assert len(told) == 1


def test_a_public_address_of_this_machine_is_inside(monkeypatch):
    monkeypatch.setattr(image_fetch, "is_public", lambda address: True)
    with Listener() as listener:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(CannotFetch, match="not at a public address"):
                fetch(listener.url(host=host))
        assert listener.connections == 0


def test_the_address_that_was_judged_is_the_one_connected_to(names, one_public):
    """The shim never asks the resolver a second time, which would answer "another machine"."""
    with Listener() as first, Listener(lambda path: whole(b"a secret")) as second:
        names["rebinding.test"] = [["127.0.0.1"], [f"127.0.0.1@{second.port}"]]
        assert fetch(first.url(host="rebinding.test"))[1] == b"a picture"
        assert (first.connections, second.connections) == (1, 0)


def test_a_dead_address_is_followed_by_the_next(names, one_public):
    with Listener() as listener, socket.create_server(("127.0.0.1", 0)) as s:
        dead = s.getsockname()[1]
        s.close()
        names["two.test"] = [[f"127.0.0.1@{dead}", "127.0.0.1"]]
        assert fetch(listener.url(host="two.test"))[1] == b"a picture"


@pytest.mark.parametrize(
    "status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
)
def test_a_redirect_on_the_same_host_is_followed(one_public, status):
    with Listener(
        lambda path: whole(b"a picture") if path == "/b" else redirect("b", status)
    ) as listener:
        assert fetch(listener.url("/a"))[1] == b"a picture"


def test_redirects_have_an_end(one_public):
    def reply(path):
        left = int(path[1:])
        return redirect(f"/{left - 1}") if left else whole(b"a picture")

    with Listener(reply) as listener:
        assert fetch(listener.url("/3"))[1] == b"a picture"
        before = listener.connections
        with pytest.raises(CannotFetch, match="more than 3 times"):
            fetch(listener.url("/4"))
        assert listener.connections == before + 4


@pytest.mark.parametrize("public", [True, False])
def test_a_redirect_elsewhere_is_not_followed(names, one_public, public):
    names |= {"allowed.test": [["127.0.0.1"]], "other.test": [["127.0.0.1"]]}
    with Listener() as other:
        elsewhere = [
            other.url(),
            other.url(host="localhost"),
            other.url(host="[::1]"),
            other.url(host="other.test"),
            other.url(host="allowed.test"),
            f"//other.test:{other.port}/",
            f"http://x@allowed.test:{other.port}/",
            f"ftp://allowed.test:{other.port}/",
            f"gopher://127.0.0.1:{other.port}/",
            "file:///etc/hostname",
            "data:,x",
            "",
            "http://",
            "http://[",
            "http://allowed.test:99999/",
            "\x00",
            "javascript:alert(1)",
        ]
        for location in elsewhere:
            listener = Listener(lambda path, location=location: redirect(location))
            with listener, pytest.raises(CannotFetch, match="is redirected"):
                fetch(listener.url(host="allowed.test"), public=public)
        assert other.connections == 0


@pytest.mark.parametrize(
    "host", ["other.test", "localhost", "127.0.0.1", "allowed.test.", "x.allowed.test"]
)
def test_a_redirect_to_another_name_at_the_same_port_is_not_followed(names, one_public, host):
    names |= {
        name: [["127.0.0.1"]]
        for name in ("allowed.test", "allowed.test.", "x.allowed.test", "other.test")
    }
    with Listener(
        lambda path: redirect(f"http://{host}:{listener.port}/") if path == "/" else whole(b"x")
    ) as listener:
        with pytest.raises(CannotFetch, match="is redirected elsewhere"):
            fetch(listener.url("/", "allowed.test"))
        assert listener.connections == 1


def test_each_hop_is_judged_again(names, one_public):
    names["moving.test"] = [["127.0.0.1"], ["127.0.0.9"]]
    with Listener(lambda path: redirect("/again")) as listener:
        with pytest.raises(CannotFetch, match="not at a public address"):
            fetch(listener.url(host="moving.test"))
        assert listener.connections == 1


def test_a_resolver_that_hangs_does_not_hold_the_request(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(60))
    monkeypatch.setattr(image_fetch, "MAX_SECONDS", 0.5)
    before = time.monotonic()
    with pytest.raises(CannotFetch, match="too long"):
        fetch("http://slow.test/")
    assert time.monotonic() - before < 30


def test_no_proxy_of_the_environment_is_asked(one_public, monkeypatch):
    with Listener() as proxy, Listener() as listener:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        fetch(listener.url())
        assert (proxy.connections, listener.connections) == (0, 1)


def test_https_with_a_certificate_that_is_checked(names, one_public, monkeypatch, tmp_path):
    names |= {
        "allowed.test": [["127.0.0.1"]],
        "allowed.test.": [["127.0.0.1"]],
        "wrong.test": [["127.0.0.1"]],
    }
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=allowed.test",
            "-addext",
            "subjectAltName=DNS:allowed.test",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Listener(context=context) as listener:
        url = f"https://allowed.test:{listener.port}/x"
        with pytest.raises(CannotFetch, match="SSLCertVerificationError"):
            fetch(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch(url) == ("image/png", b"a picture")
        assert fetch(url.replace(".test", ".test."))[1] == b"a picture"
        with pytest.raises(CannotFetch, match="SSLCertVerificationError"):
            fetch(url.replace("allowed", "wrong"))
        # A redirect from http up to https is followed.
        with Listener(lambda path: redirect(url)) as plain:
            assert fetch(plain.url(host="allowed.test"))[1] == b"a picture"
        down = Listener(
            lambda path: redirect(f"http://allowed.test:{plain.port}/"), context=context
        )
        with down, pytest.raises(CannotFetch, match="redirected elsewhere"):
            fetch(f"https://allowed.test:{down.port}/")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://", "no host"),
        ("http:///x", "no host"),
        ("http://:80/", "no host"),
        ("http://a:0/", "port is 0"),
        ("http://a:99999/", "not a URL"),
        ("http://a:x/", "not a URL"),
        ("http://a:-1/", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http://::1/", "no"),
        ("http://[fe80::1%25eth0]/", "no"),
        ("http://u@a/", "user name"),
        ("http://u:p@a/", "user name"),
        ("http://@a/", "user name"),
        ("http://a\\@b/", "user name"),
        ("http://a\\b/", "no host"),
        ("http://%6c%6f/", "no host"),
        ("http://a b/", "space"),
        ("http://a/\r\nHost: b", "control"),
        ("http://a/\x00", "control"),
        (" http://a/", "space"),
        ("http://a\t/", "control"),
        ("http://a/\x7f", "control"),
        ("http://a/ü", "ASCII"),
        ("http://a/?ü", "ASCII"),
        ("http://a..b/", "not a URL"),
        ("http://-a/", "no host"),
        ("http://.a/", "not a URL"),
        ("http://a;b/", "no host"),
        (f"http://{'a' * 64}.test/", "not a URL"),
        ("http://a/" + "x" * 9000, "characters"),
        ("http://\ud800/", "not a URL"),
        ("http://a/\ud800", "ASCII"),
        ("ftp://a/", "neither"),
        ("file:///etc/passwd", "neither"),
    ],
)
def test_what_is_no_url(url, why):
    with pytest.raises(CannotFetch, match=why):
        parse(url)


def test_what_is_one():
    assert parse("https://Bücher.Example").host == "xn--bcher-kva.example"
    target = parse("http://a.test?x=@#y")
    assert (target.host, target.port, target.path) == ("a.test", 80, "/?x=@")
    assert parse("https://a_b.test:8443/%20").port == 8443
