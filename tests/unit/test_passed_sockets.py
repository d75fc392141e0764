"""Sockets that a supervisor passes in: for which process they are, and which can serve."""

from __future__ import annotations

import ctypes
import errno
import inspect
import os
import socket
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mlx_lm import server as stock

from shim.core import settings
from shim.core.verdicts import Incompatible
from shim.engine import fatal
from shim.guards import refused_while_down
from shim.guards.refused_while_down import passed_sockets
from shim.guards.refused_while_down.passed_sockets import Unusable


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as s:
        yield s


def test_what_is_passed_to_another_process_is_not_ours(capfd):
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1"}
    assert passed_sockets.from_systemd(environ) == []
    assert len(environ) == 2
    assert "LISTEN_FDS is for the process 1 and this is" in capfd.readouterr().err
    assert passed_sockets.from_systemd({}) == []
    assert capfd.readouterr().err == ""


def test_what_is_passed_to_us_is_not_passed_on():
    environ = {
        "LISTEN_FDS": "2",
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDNAMES": "a:b",
        "LISTEN_PIDFDID": "1",
        "X": "",
    }
    assert passed_sockets.from_systemd(environ) == [3, 4]
    assert environ == {"X": ""}


@pytest.mark.parametrize("count", ["", "0", "-1", "x", "99999"])
def test_a_number_that_is_none(count):
    with pytest.raises(Unusable, match="not a number of sockets"):
        passed_sockets.from_systemd({"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())})


def launchd(fds, failure=0):
    """A C function with the documented signature. It notes its arguments and what is freed."""
    libc, asked, freed = ctypes.CDLL(None), [], []
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    pointers = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *pointers)
    def activate(name, array, count):
        asked.append(name)
        if not failure:
            array[0] = libc.malloc(ctypes.sizeof(ctypes.c_int) * len(fds))
            ctypes.memmove(
                array[0], (ctypes.c_int * len(fds))(*fds), ctypes.sizeof(ctypes.c_int) * len(fds)
            )
            count[0] = len(fds)
        return failure

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(array):
        freed.append(array)
        libc.free(ctypes.c_void_p(array))

    return types.SimpleNamespace(
        launch_activate_socket=activate, free=free, asked=asked, freed=freed
    )


def test_launchd():
    library = launchd([7, 1 << 20])
    assert passed_sockets.from_launchd("Listeners", library) == [7, 1 << 20]
    assert library.asked == [b"Listeners"]
    assert len(library.freed) == 1


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (launchd([], errno.ENOENT), "the plist's Sockets has no such key"),
        (launchd([], errno.ESRCH), "launchd did not start this process"),
        (launchd([], errno.EALREADY), "already in progress"),
        (launchd([]), "none under that key"),
        (None, "this system has none"),
    ],
)
def test_launchd_that_passes_none(library, why):
    with pytest.raises(Unusable, match=why):
        passed_sockets.from_launchd("Listeners", library)


def test_which_can_be_served_on(listening, tmp_path):
    with (
        socket.socket() as idle,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
        socket.create_connection(listening.getsockname()) as connected,
        (tmp_path / "file").open("w") as file,
    ):
        listening.set_inheritable(True)
        bad = [s.fileno() for s in (idle, datagrams, connected, file)]
        closed = os.dup(0)
        os.close(closed)
        usable, reasons = passed_sockets.opened([*bad, closed, listening.fileno()])
        assert [s.detach() for s in usable] == [listening.fileno()]
        assert not listening.get_inheritable()
        said = (
            "does not listen",
            "wanted: a stream",
            "does not listen",
            "is not a socket",
            "is not a socket",
        )
        assert [end in reason for end, reason in zip(said, reasons, strict=True)] == [True] * 5
        assert idle.fileno() != -1


def test_the_one_on_the_port_is_chosen(listening, tmp_path):
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as other:
        unix.bind(str(tmp_path / "socket"))
        port = other.getsockname()[1]
        assert passed_sockets.chosen([unix, listening, other], port) is other
        assert passed_sockets.chosen([unix, listening, other], 1) is unix
        assert passed_sockets.address_text(unix) == f"unix:{tmp_path}/socket"
        assert passed_sockets.address_text(other) == f"127.0.0.1:{port}"


class Own(ThreadingHTTPServer):
    def serve_forever(self):
        raise NotImplementedError("served by a class of its own")


def test_a_server_class_of_a_programs_own_is_left_alone(monkeypatch):
    monkeypatch.setattr(
        refused_while_down, "_take", lambda _: pytest.fail("it sees to its sockets itself")
    )
    with pytest.raises(NotImplementedError), pytest.warns(UserWarning, match="production"):
        refused_while_down._serve(
            inspect.unwrap(stock._run_http_server), None, ("127.0.0.1", 0, None, Own), {}
        )


def test_the_standard_librarys_class_stays_as_it_is(listening, monkeypatch):
    """A second server of the same program still finds the socket."""
    served = []
    monkeypatch.setattr(refused_while_down, "_passed", [listening.fileno()])
    monkeypatch.setattr(refused_while_down.errors, "after_end", 10)
    before = dict(vars(ThreadingHTTPServer))

    def serve_forever(self):
        served.append(self)

    for _ in range(2):
        run = inspect.unwrap(stock._run_http_server)
        monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve_forever, raising=False)
        with pytest.warns(UserWarning, match="production"):
            refused_while_down._serve(
                run,
                None,
                (),
                {"host": "no.such.host.invalid", "port": 1, "response_generator": None},
            )
        monkeypatch.delattr(ThreadingHTTPServer, "serve_forever")
        server = served.pop()
        assert server.server_address == listening.getsockname()
        assert (server.server_name, server.server_port) == listening.getsockname()
        with socket.create_connection(listening.getsockname()) as client:
            _, address = server.get_request()
            assert address == client.getsockname()
        server.server_close()
    assert dict(vars(ThreadingHTTPServer)) == before
    assert refused_while_down.errors.engine_dead().retry_after == 1


def test_a_socket_that_cannot_be_used_is_78(monkeypatch):
    monkeypatch.setattr(refused_while_down, "_passed", None)
    monkeypatch.setattr(settings, "current", settings.Settings(launchd_socket="Listeners"))
    monkeypatch.setattr(
        fatal, "die", lambda status, why: (_ for _ in ()).throw(SystemExit(f"{status} {why}"))
    )
    with pytest.raises(
        SystemExit, match=r"78 the socket to serve on cannot be used: .*'Listeners'"
    ):
        refused_while_down._serve(
            inspect.unwrap(stock._run_http_server), None, ("127.0.0.1", 0, None), {}
        )


def test_a_server_that_binds_by_itself_is_left_alone():
    def bare(host, port, response_generator):
        return BaseHTTPRequestHandler

    def deaf(host, port, response_generator, server_class=ThreadingHTTPServer):
        return server_class

    refused_while_down.probe(stock)
    for other in (bare, deaf):
        module = types.SimpleNamespace(
            __name__="server", _run_http_server=other, APIHandler=stock.APIHandler
        )
        with pytest.raises(Incompatible, match="does not serve by a server class"):
            refused_while_down.probe(module)
