"""Sends requests as bytes on a socket, and reads all of the answer."""

from __future__ import annotations

import socket


def raw(server, data, patience=30.0):
    """Send bytes, and return all that the server answers until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience) as s:
        s.sendall(data)
        return read_all(s)


def read_all(s):
    answer = b""
    while piece := s.recv(65536):
        answer += piece
    return answer


def head(length, *lines):
    fields = "".join(
        f"{x}\r\n"
        for x in (f"Content-Length: {length}" if length is not None else None, *lines)
        if x
    )
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()
