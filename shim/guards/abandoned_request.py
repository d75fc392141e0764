"""A client goes away and its request is computed to the end, for nobody.

Stock notices only when it writes to a stream in decode. Here the waiting handler looks at its connection once a
second, whatever the request is doing, and has it stopped wherever it is: in the server's queue (taken out), waiting in
the batch (removed by way of stock's own path), in prefill (after the step under way), in decode, and alone in the loop
(`seed`, images). Only the prefill beside a draft model cannot be stopped: it reports nothing. A client that closes only
its sending half counts as gone: no more than that can be seen without writing to it.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import Any

from ..core import patch
from ..core.errors import ClientGone
from ..engine import facts, queues
from ..engine.entries import Entry
from ..engine.state import engine

UPSTREAM = "mlx-lm 362, 405, 677"
MODULE = "mlx_lm.server"


LIVES_BY = {
    "deliveries": facts.NEEDED,
    "tokenizing": "a request whose client left just before it was taken up is stopped only then",
    "batch": "a request that waits in the batch is stopped when its prompt begins",
    "single": "a prompt that is served alone is computed to its end",
}


def probe(server: Any) -> None:
    """By who waits for what is delivered: the facts tell."""


def apply(server: Any) -> None:
    queues.checks.append(_check)
    patch.try_wrap(server, "ResponseGenerator._tokenize", _tokenize)
    patch.try_wrap(server, "BatchGenerator.next", patch.after(_stepped))


def _check(entry: Entry) -> None:
    try:
        gone = (
            entry.handler is not None and entry.own is None and _is_gone(entry.handler.connection)
        )
    except OSError:  # no descriptor is free for a kqueue: no reason to fail a request
        return
    if gone:
        entry.outcome = "abandoned"
        raise ClientGone


def _is_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed its side, whatever it may have sent before."""
    if connection.fileno() < 0:
        return True
    if hasattr(select, "POLLRDHUP"):  # Linux
        poller = select.poll()
        poller.register(connection, select.POLLRDHUP)
        return bool(poller.poll(0))
    bsd: Any = select  # macOS has kqueue, and no POLLRDHUP
    queue = bsd.kqueue()
    try:
        event = bsd.kevent(connection.fileno(), bsd.KQ_FILTER_READ, bsd.KQ_EV_ADD)
        return any(e.flags & bsd.KQ_EV_EOF for e in queue.control([event], 1, 0))
    finally:
        queue.close()


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The first thing done for a request, in a try whose exception goes to that request alone."""
    request = patch.given(wrapped, args, kwargs, "request", 1)
    entry = (
        None if engine.distributed else engine.entry_of(request)
    )  # other ranks would go on without us
    if entry is not None and entry.stopped:
        raise queues.Stopped
    return wrapped(*args, **kwargs)


def _stepped(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    """Report a stopped sequence that still waits for its turn as if it had advanced.

    Stock then sees that it should stop and removes it, on all ranks. By itself it would prefill it first.
    """
    entries = batch.__dict__.get("_shim_entries")
    if entries:
        response = sys.modules[type(batch).__module__].PromptProcessingBatch.Response
        for sequence in batch._unprocessed_sequences:
            entry = entries.get(sequence[0])
            if entry is not None and entry.stopped:
                responses[0].append(
                    response(sequence[0], (0, 0), end_of_segment=False, end_of_prompt=False)
                )
