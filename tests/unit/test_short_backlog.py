"""Which server classes get a longer backlog, and which stock does without the guard."""

from __future__ import annotations

import inspect
import socket
import types
from http.server import ThreadingHTTPServer

import pytest
from mlx_lm import server as stock

from shim.core.verdicts import Incompatible, Retired
from shim.guards import refused_while_down, short_backlog


class Modest(ThreadingHTTPServer):
    """Of a program that did not think of the backlog."""


class Ample(ThreadingHTTPServer):
    request_queue_size = 128


def served(*server_class):
    """The server class that stock is given in the end."""
    found = []

    def run(host, port, response_generator, server_class=ThreadingHTTPServer):
        found.append(server_class)

    short_backlog._serve(run, None, ("127.0.0.1", 0, None, *server_class), {})
    return found[0]


@pytest.mark.parametrize("given", [(), (Modest,)], ids=["stock", "a program"])
def test_a_class_with_the_backlog_of_socketserver_gets_more(given):
    original = given[0] if given else ThreadingHTTPServer
    assert issubclass(served(*given), original)
    assert served(*given).request_queue_size == short_backlog.BACKLOG
    assert original.request_queue_size == 5


def test_a_class_that_asks_for_more_is_left_alone():
    assert served(Ample) is Ample


def test_a_factory_is_left_alone():
    def factory(address, handler):
        return Modest(address, handler)

    assert served(factory) is factory


def test_a_passed_socket_is_left_to_its_guard():
    with socket.create_server(("127.0.0.1", 0)) as passed:
        own = refused_while_down.serving_on(ThreadingHTTPServer, passed)
        assert served(own) is own
    assert refused_while_down.BACKLOG == short_backlog.BACKLOG


def module(run):
    return types.SimpleNamespace(__name__="server", _run_http_server=run)


def class_with(backlog):
    def run(host, port, response_generator, server_class=ThreadingHTTPServer):
        server_class.request_queue_size = backlog
        server_class((host, port), None).serve_forever()

    return run


def late(host, port, response_generator, server_class=ThreadingHTTPServer):
    server = server_class((host, port), None)
    server.socket.listen(64)
    server.serve_forever()


@pytest.mark.parametrize("run", [class_with(128), late])
def test_a_cure_in_the_function_retires_the_guard(run):
    with pytest.raises(Retired, match="listens with a backlog of"):
        short_backlog.probe(module(run))
    assert ThreadingHTTPServer.request_queue_size == 5


def bare(host, port, response_generator):
    return None


def deaf(host, port, response_generator, server_class=ThreadingHTTPServer):
    return server_class


def another_kind(host, port, response_generator, server_class=object):
    return server_class


@pytest.mark.parametrize("run", [bare, deaf, another_kind])
def test_a_server_that_listens_in_another_way_is_left_alone(run):
    with pytest.raises(Incompatible, match="does not listen by a server class"):
        short_backlog.probe(module(run))


def test_the_probe_opens_no_port_and_says_nothing(monkeypatch, recwarn):
    quiet = types.SimpleNamespace(info=lambda *_: pytest.fail("the probe logs"))
    for name in ("bind", "listen"):
        monkeypatch.setattr(socket.socket, name, lambda *_: pytest.fail("the probe listens"))
    names = {"logging": quiet, "__name__": stock.__name__}
    short_backlog.probe(types.SimpleNamespace(**{**vars(stock), **names}))
    assert not recwarn.list
    assert "server_class" in inspect.signature(stock._run_http_server).parameters
