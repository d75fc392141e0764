"""An HTTP thread that answers: the shim counts it, sees its bytes, and has it pass on errors."""

from __future__ import annotations

import io
import json
import types
from http.server import BaseHTTPRequestHandler

import pytest

from shim.core import errors, report
from shim.engine import answering, facts


class Handler:
    """The parts of a handler that the shim uses."""

    stream = False
    command = "POST"
    request_version = "HTTP/1.1"

    def __init__(self):
        self.wfile = io.BytesIO()
        self._headers_buffer = []
        self.close_connection = False

    send_header = BaseHTTPRequestHandler.send_header

    def send_response(self, status):
        answering._note_status(self, (status,), {}, None)
        self._headers_buffer.append(f"HTTP/1.0 {status}\r\n".encode())

    def _set_cors_headers(self):
        self.send_header("Access-Control-Allow-Origin", "*")


@pytest.fixture
def handler(engine, monkeypatch):
    monkeypatch.setattr(answering, "engine", engine)
    monkeypatch.setattr(report, "states", {"wrong_status": report.State("incompatible")})
    return Handler()


def post(handler, body):
    return answering._do_post(lambda: body(handler), handler, (), {})


def test_what_a_waiter_is_told_becomes_the_status_where_nothing_has_gone_out(engine, handler):
    raw = handler.wfile

    def waits(handler):
        # Stock has queued it, and not sent it.
        handler._headers_buffer.append(b"HTTP/1.0 200 OK\r\n")
        raise errors.engine_dead()

    post(handler, waits)
    head, _, body = raw.getvalue().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 503")
    assert json.loads(body)["error"]["code"] == "engine_dead"
    assert handler.wfile is raw
    assert (engine.served, engine.answers) == (0, {})


def test_in_the_middle_of_a_stream_it_is_an_event(handler):
    handler.stream = True

    def streams(handler):
        handler.wfile.write(b"data: x\n\n")
        raise errors.engine_stalled()

    raw = handler.wfile
    post(handler, streams)
    last = raw.getvalue().decode().strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stalled"
    assert handler.close_connection


def test_wrong_status_has_it_where_it_is_active(engine, handler, monkeypatch):
    # Deliveries can be seen.
    engine.deliveries = 1
    monkeypatch.setattr(report, "states", {"wrong_status": report.State("active")})

    def raises(handler):
        assert isinstance(handler.wfile, io.BytesIO), "the shim looks at no byte"
        raise errors.engine_dead()

    with pytest.raises(errors.ShimError):
        post(handler, raises)


def test_an_answer_of_200_is_one_that_was_served(engine, handler):
    post(handler, lambda handler: handler.send_response(200))
    post(handler, lambda handler: handler.send_response(404))
    assert engine.served == 1


def test_the_whole_request_counts_where_its_answer_cannot_be_told(engine, handler, monkeypatch):
    monkeypatch.setattr(facts.known["handlers"], "lost", "for a test")
    seen = []
    post(handler, lambda handler: seen.append((engine.in_flight, engine.local.handler)))
    assert seen == [(1, handler)]
    assert engine.in_flight == 0


def test_the_handler_is_found_by_its_kind(monkeypatch):
    module = types.SimpleNamespace(Other=type("Other", (BaseHTTPRequestHandler,), {}))
    assert answering.name_in(module) == "APIHandler", (
        "the class of another program is not the server's"
    )
    monkeypatch.setattr(answering.anatomy, "is_of_mlx_lm", lambda file: True)
    assert answering.name_in(module) == "Other"
