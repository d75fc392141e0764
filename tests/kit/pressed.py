"""Memory in use, for tests of the memory guard: requests of a size, and a prompt cache."""

from __future__ import annotations

from shim.engine.entries import DECODE

MIB = 2**20


class Entries:
    """A prompt cache of so many bytes."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def trim_to(self, n_bytes):
        self.nbytes = min(self.nbytes, max(0, n_bytes))


def victims(engine):
    return [entry.id for entry in engine.entries.values() if entry.stopped]


def running(request_, tokens):
    entry, queue = request_()
    entry.phase, entry.prompt = DECODE, tokens
    return entry, queue
