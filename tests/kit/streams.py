"""A streamed answer, read in its own thread, and the error that one ended with."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

from kit.harness import ANSWER, Server


class Stream:
    """A streamed completion, read in its own thread: its raw lines, and how it ended."""

    def __init__(
        self,
        server: Server,
        body: dict[str, Any],
        path: str = "/v1/completions",
        timeout: float = ANSWER,
    ):
        self.lines: list[str] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error: BaseException | None = None
        self.first = threading.Event()
        self.body = {**body, "stream": True}
        self._args = (server, self.body, path, timeout)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        server, body, path, timeout = self._args
        connection = server.connect(timeout)
        try:
            connection.request(
                "POST",
                path,
                json.dumps(body).encode(),
                {"Content-Type": "application/json"} | server.headers,
            )
            answer = connection.getresponse()
            self.status, self.headers = answer.status, dict(answer.headers)
            for raw in answer:
                self.lines.append(raw.decode(errors="replace").rstrip("\n"))
                if self.lines[-1].startswith("data:"):
                    self.first.set()
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            connection.close()
            self.first.set()

    def join(self, timeout: float = ANSWER) -> Stream:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), (
            f"the stream still hangs after {timeout} s: {self.lines[-3:]}"
        )
        return self

    @property
    def events(self) -> Iterator[Any]:
        for line in self.lines:
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])

    @property
    def done(self) -> bool:
        return "data: [DONE]" in self.lines

    @property
    def text(self) -> str:
        return "".join(e["choices"][0].get("text", "") for e in self.events if e.get("choices"))


def error_of(stream: Stream) -> Any:
    """The error that a stream ended with, from its status or its last event."""
    if stream.status != 200:
        assert stream.headers["Content-Type"] == "application/json"
        return json.loads(stream.lines[-1])["error"]
    last = list(stream.events)[-1]
    assert "error" in last, stream.lines[-3:]
    return last["error"]
