"""The headers of an answer wait for its body, and go out with its first part in one write."""

from __future__ import annotations

import types

from shim.core.answers import HeldBody

HEADERS, BODY = b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\n", b"body"


def held():
    sent = []
    return HeldBody(types.SimpleNamespace(write=lambda data: sent.append(bytes(data)))), sent


def test_a_whole_answer_is_one_write():
    """With two, a process that ends between them leaves half an answer, which no proxy retries."""
    out, sent = held()
    out.write(HEADERS)
    assert sent == []
    assert not out.begun
    assert out.write(BODY) == len(BODY)
    assert sent == [HEADERS + BODY]
    out.write(BODY)
    assert sent == [HEADERS + BODY, BODY]


def test_headers_alone_go_out_in_the_end():
    out, sent = held()
    out.write(HEADERS)
    out.release()
    out.release()
    assert sent == [HEADERS]
    assert out.begun


def test_dropped_they_never_do():
    out, sent = held()
    out.write(HEADERS)
    out.drop()
    out.release()
    assert sent == []
    assert not out.begun
