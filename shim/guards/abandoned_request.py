"""A client goes away, and its request is computed to the end for no one.

Stock notices only when it writes to a stream during decode. Here the waiting handler looks at its
connection once a second, whatever the request is doing, and stops the request wherever it is:

* in the server's queue: the guard takes it out;
* waiting in the batch: the guard has it removed by stock's own path;
* in prefill: it ends after the current step;
* in decode, and alone in the loop (requests with `seed` or images).

A prefill with a draft model cannot be stopped, as it reports nothing. A client that closes only
its sending half counts as gone: the two cases look the same until the server writes.
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
    """Nothing to try: the facts of LIVES_BY tell whether the guard can act."""


def apply(server: Any) -> None:
    queues.checks.append(_check)
    patch.try_wrap(server, "ResponseGenerator._tokenize", _tokenize)
    patch.try_wrap(server, "BatchGenerator.next", patch.after(_stepped))


def _check(entry: Entry) -> None:
    try:
        # A request of the shim's own has no client that could leave.
        if entry.handler is None or entry.own is not None:
            return
        gone = _is_gone(entry.handler.connection)
    # No free descriptor for a kqueue: that must not fail a request.
    except OSError:
        return
    if gone:
        entry.outcome = "abandoned"
        raise ClientGone


def _is_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed its side, even if what it sent before is still unread."""
    if connection.fileno() < 0:
        return True
    # Linux has it, macOS does not.
    if hasattr(select, "POLLRDHUP"):
        poller = select.poll()
        poller.register(connection, select.POLLRDHUP)
        return bool(poller.poll(0))
    # Only macOS and the BSDs have kqueue, so its type is not known here.
    bsd: Any = select
    queue = bsd.kqueue()
    try:
        event = bsd.kevent(connection.fileno(), bsd.KQ_FILTER_READ, bsd.KQ_EV_ADD)
        return any(e.flags & bsd.KQ_EV_EOF for e in queue.control([event], 1, 0))
    finally:
        queue.close()


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Stop a request that is taken up; stock gives an exception here to that request alone."""
    request = patch.given(wrapped, args, kwargs, "request", 1)
    # Where several machines share a model, the other ranks would go on without this one.
    entry = None if engine.distributed else engine.entry_of(request)
    if entry is not None and entry.stopped:
        raise queues.Stopped
    return wrapped(*args, **kwargs)


def _stepped(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    """Report a stopped sequence that still waits for its turn as if it had advanced.

    Stock then sees that it should stop and removes it, on all ranks. Without the report stock would
    prefill it first.
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
