"""A stream whose `stream_options` do not name `include_usage` is cut off at its end.

After the last token stock reads `stream_options["include_usage"]`: it raises KeyError, and the
stream ends without [DONE]. Here an absent `include_usage` means false, as in OpenAI's API.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from ..core import patch
from ..core.verdicts import Retired, require
from ..probing import dry_run
from ..probing.dry_run import Anything

UPSTREAM = "no issue known"
MODULE = "mlx_lm.server"

KEY = "include_usage"


def probe(server: Any) -> None:
    """Have stock answer a stream of no tokens with empty options."""
    require(server, "APIHandler.handle_completion")
    out = io.BytesIO()
    handler = Anything(
        wfile=out,
        stream=True,
        stream_options={},
        generate_response=lambda *_, **__: {},
        response_generator=Anything(generate=lambda *_, **__: (Anything(), ())),
    )
    # Any exception means that the guard is needed: only a complete answer shows that it is not.
    with contextlib.suppress(Exception):
        dry_run.of(server.APIHandler.handle_completion, logging=Anything())(handler, Anything(), [])
    if b"[DONE]" in out.getvalue():
        raise Retired("a stream with empty stream_options is complete")


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler.handle_completion", _handle_completion)


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    options = getattr(instance, "stream_options", None)
    if isinstance(options, dict) and KEY not in options:
        instance.stream_options = {**options, KEY: False}
    return wrapped(*args, **kwargs)
