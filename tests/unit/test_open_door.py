"""Which key files are trusted, and how a key is compared."""

from __future__ import annotations

import hmac
import http.client
import io
import os

import pytest

from shim import boot
from shim.core import report, settings
from shim.core.verdicts import Refused
from shim.guards import open_door

KEY = "correct-horse-battery-staple"


@pytest.fixture
def key_file(tmp_path):
    def make(content, mode=0o600):
        file = tmp_path / "key"
        file.write_bytes(content)
        file.chmod(mode)
        return str(file)

    return make


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o660])
def test_a_key_and_the_space_around_it(key_file, mode):
    assert open_door.read_key(key_file(f" \t{KEY}\r\n\n".encode(), mode)) == KEY.encode()


REFUSED = {
    "empty": (b" \n", 0o600, "is empty"),
    "short": (b"x" * 15, 0o600, "fewer than 16"),
    "two words": (f"{KEY} {KEY}".encode(), 0o600, "not one word"),
    "two lines": (f"{KEY}\n{KEY}".encode(), 0o600, "not one word"),
    "not ASCII": ("schlüssel".encode() + KEY.encode(), 0o600, "not one word"),
    "control characters": (KEY.encode() + b"\x7f\x1b", 0o600, "not one word"),
    "large": (b"x" * 5000, 0o600, "more than 4096 bytes"),
    "read by anyone": (KEY.encode(), 0o644, "mode is 0644"),
    "written by anyone": (KEY.encode(), 0o602, "mode is 0602"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(key_file, case):
    content, mode, why = REFUSED[case]
    with pytest.raises(Refused, match=why) as refused:
        open_door.read_key(key_file(content, mode))
    assert not any(word in str(refused.value) for word in (KEY, "schl", "xxx"))


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name, why in (
        ("missing", "No such file"),
        ("", "not a regular file"),
        ("fifo", "not a regular file"),
        ("missing/key", "No such"),
    ):
        with pytest.raises(Refused, match=why) as refused:
            open_door.read_key(str(tmp_path / name))
        assert str(tmp_path) not in str(refused.value), (
            "it may be the key itself, in the wrong place"
        )
    with pytest.raises(Refused, match="cannot be read"):
        open_door.read_key("~nobody-has-this-name/key")


class Handler:
    def __init__(self, authorization=(), command="POST", path="/v1/completions"):
        text = "".join(f"Authorization: {value}\r\n" for value in authorization) + "\r\n"
        self.headers = http.client.parse_headers(io.BytesIO(text.encode("latin-1")))
        self.command, self.path = command, path


WITH_KEY = [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY} "]
WITHOUT = [
    "",
    "Bearer",
    "Bearer ",
    KEY,
    f"Basic {KEY}",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY.upper()}",
    f"Bearer {KEY} {KEY}",
    f"Bearer{KEY}",
    "Bearer \xe9\xff",
    f"Bearer, Bearer {KEY}",
    "Bearer " + "x" * 30_000,
]


def test_every_comparison_takes_the_same_time_whatever_was_brought(monkeypatch):
    compared = []

    def spy(given, wanted):
        compared.append((given, wanted))
        return hmac_compare(given, wanted)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(open_door.hmac, "compare_digest", spy)
    door = open_door._Door(KEY.encode())
    assert all(door._has_key(Handler([value])) for value in WITH_KEY)
    assert not any(door._has_key(Handler([value])) for value in WITHOUT)
    assert not door._has_key(Handler())
    assert not door._has_key(Handler([f"Bearer {KEY}", "Bearer x"])), (
        "it is not clear which of the two counts"
    )
    assert len(compared) == len(WITH_KEY) + len(WITHOUT) + 2, (
        "missing and malformed keys are compared too"
    )
    assert all(type(given) is bytes and wanted == KEY.encode() for given, wanted in compared)
    assert KEY not in repr(door) + str(door)


def test_what_is_public():
    public = [
        ("GET", "/health"),
        ("GET", "/health?x=1"),
        ("GET", "/health/ready"),
        ("GET", "/health/live"),
    ]
    for command, path in [*public, ("OPTIONS", "/v1/completions"), ("OPTIONS", "*")]:
        assert open_door._is_public(Handler(command=command, path=path))
    for command, path in [
        ("GET", "/v1/models"),
        ("GET", "/healthz"),
        ("GET", "/health/../v1/models"),
        ("GET", "/HEALTH"),
        ("GET", "/"),
        ("GET", "http://x/health"),
        ("POST", "/health"),
        ("DELETE", "/health"),
        ("GET", "/v1/models?/health"),
        ("options", "/v1/models"),
        ("GET", "/health#"),
        ("GET", "/health/ready/x"),
        ("GET", "/health%3f"),
    ]:
        assert not open_door._is_public(Handler(command=command, path=path))


class Server:
    """Stands for mlx_lm.server."""

    __name__ = "server"

    def __init__(self):
        class APIHandler(Handler):
            def parse_request(self):
                return True

            def _set_cors_headers(self):
                pass

        self.APIHandler = APIHandler


@pytest.fixture
def asked_for(monkeypatch, tmp_path):
    """The setting names a file that does not exist."""
    monkeypatch.setattr(
        settings, "current", settings.Settings(api_key_file=str(tmp_path / "missing"))
    )
    monkeypatch.setattr(report, "states", {})


def test_where_the_file_is_refused_not_even_a_server_that_starts_all_the_same_is_open(
    asked_for, monkeypatch
):
    turned_away = []
    monkeypatch.setattr(
        open_door.answers, "refuse", lambda _, error, __: turned_away.append(error.status)
    )
    server = Server()
    state = boot._apply("open_door", server)
    assert (state.kind, state.reason) == (
        "failed",
        "the key file cannot be read: No such file or directory",
    )
    for authorization in ([], ["Bearer"], ["Bearer "], [f"Bearer {KEY}"]):
        assert not server.APIHandler(authorization).parse_request()
    assert turned_away == [401] * 4


def test_a_setting_that_no_guard_keeps_is_a_reason_not_to_start(asked_for, monkeypatch):
    assert boot._unkept() == ["what MLX_SHIM_API_KEY_FILE asks for cannot be given: open_door None"]
    for kind in ("incompatible", "failed", "retired"):
        report.states["open_door"] = report.State(kind, "why")
        assert boot._unkept() == [
            f"what MLX_SHIM_API_KEY_FILE asks for cannot be given: open_door {kind} (why)"
        ]
    report.states["open_door"] = report.State("active")
    assert boot._unkept() == []
    report.states["open_door"] = report.State("failed")
    monkeypatch.setattr(settings, "current", settings.Settings())
    assert boot._unkept() == [], "no setting asks for it"
