"""Measures a server's memory from outside with psutil. Also a client that retries when refused."""

from __future__ import annotations

import threading
import time

import psutil

MIB = 2**20


class Scales:
    """The largest resident set of a process while it is watched."""

    def __init__(self, server):
        self.process, self._stop = psutil.Process(server.pid), threading.Event()
        self.before = self.most = self.now()
        self._thread = threading.Thread(target=self._weigh)
        self._thread.start()

    def now(self):
        return self.process.memory_info().rss

    def _weigh(self):
        while not self._stop.wait(0.02):
            try:
                self.most = max(self.most, self.now())
            except psutil.NoSuchProcess:
                return

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def warm(server):
    """The resident set of a server that has served something."""
    assert server.ready().post({"prompt": "warm", "max_tokens": 2})[0] == 200
    return psutil.Process(server.pid).memory_info().rss


def patient(server, body, path="/v1/completions"):
    """Status and answer for a client that tries again as long as memory is short."""
    for _ in range(20):
        status, answer = server.post(body, path)
        if status != 503:
            break
        assert answer["error"]["code"] == "memory_pressure"
        time.sleep(0.5)
    return status, answer


def text_of(answer):
    """The text of an answer; the whole answer where it is an error."""
    return answer[1]["choices"][0]["text"] if answer[0] == 200 else answer
