"""A client goes away and its request is computed to the end, for nobody.

Stock notices only when it writes to a stream in decode. Here the waiting handler looks at its connection once a
second, whatever the request is doing, and has it stopped wherever it is: in the server's queue (taken out), waiting in
the batch (removed by way of stock's own path), in prefill (after the step under way), in decode, and alone in the loop
(`seed`, images, a draft model). A client that closes only its sending half counts as gone: no more than that can be
seen without writing to it.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import Any

from .. import ledger, patch
from ..engine import Entry, engine
from ..errors import ClientGone
from . import require

UPSTREAM = "mlx-lm 362, 405, 677"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(
        server, "ResponseGenerator._tokenize", "ResponseGenerator._serve_single", "BatchGenerator.next",
        "BatchGenerator.insert_segments", "GenerationContext.stop", "Queue", "Response",
    )  # fmt: skip


def apply(server: Any) -> None:
    ledger.checks.append(_check)
    patch.wrap(server, "ResponseGenerator._tokenize", _tokenize)
    patch.wrap(server, "BatchGenerator.insert_segments", _insert_segments)
    patch.wrap(server, "BatchGenerator.next", _next)


def _check(entry: Entry) -> None:
    if entry.handler is not None and _is_gone(entry.handler.connection):
        engine.counters["abandoned"] += 1
        raise ClientGone


def _is_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed: there is something to read, and it is the end."""
    if connection.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(0):
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The first thing done for a request, in a try whose exception goes to that request alone."""
    request = args[1] if len(args) > 1 else kwargs.get("request")
    entry = None if engine.distributed else engine.entry_of(request)  # other ranks would go on without us
    if entry is not None and entry.stopped:
        raise ledger.Stopped
    return wrapped(*args, **kwargs)


def _insert_segments(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Remember whose sequence this is: the entry whose context was put on its queue just before."""
    uids = wrapped(*args, **kwargs)
    entry, engine.inserting = engine.inserting, None
    if entry is not None and len(uids) == 1:
        instance.__dict__.setdefault("_shim_entries", {})[uids[0]] = entry
    return uids


def _next(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Report a stopped sequence that still waits for its turn as if it had advanced.

    Stock then sees that it should stop and removes it, on all ranks. By itself it would prefill it first.
    """
    prompts, tokens = wrapped(*args, **kwargs)
    entries = instance.__dict__.get("_shim_entries")
    if entries:
        waiting = {sequence[0] for sequence in instance._unprocessed_sequences}
        response = sys.modules[type(instance).__module__].PromptProcessingBatch.Response
        for uid, entry in list(entries.items()):
            if uid not in waiting:
                del entries[uid]  # its turn has come: from here on stock looks at it by itself
            elif entry.stopped:
                prompts.append(response(uid, (0, 0), end_of_segment=False, end_of_prompt=False))
    return prompts, tokens
