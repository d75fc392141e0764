"""Every failure gets 404, and a stream that fails is cut off: it looks complete, or is empty.

Stock answers every exception of `generate()` with 404 and a bare string. A failure after that
closes the connection, or ends a stream under a 200 without an error. Here a bad request gets 400, a
model that does not exist 404, a failed generation 500, and an engine that cannot serve 503, in the
format of OpenAI's API. In the middle of a stream the client gets one SSE event
`data: {"error": ...}` and no [DONE].
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from ..core import answers, errors, patch, report
from ..core.errors import ClientGone, ShimError
from ..core.verdicts import require
from ..engine.state import engine
from ..models import model_names

UPSTREAM = "mlx-lm 1693, 1685, 1034, 1909"
MODULE = "mlx_lm.server"

NOT_FOUND = 404


class _Answer(Exception):
    """Carries an exception of `generate` out of stock's except block, which would answer 404."""


def probe(server: Any) -> None:
    require(
        server,
        "APIHandler.handle_completion",
        "APIHandler._set_completion_headers(status_code)",
        "APIHandler._set_cors_headers",
        "APIHandler.do_POST",
        "ResponseGenerator._tokenize",
        "ModelProvider.load",
    )


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler._set_completion_headers", _set_completion_headers)
    patch.wrap(server, "APIHandler.handle_completion", _handle_completion)
    patch.wrap(server, "APIHandler.do_POST", _do_post)
    patch.wrap(server, "ResponseGenerator._tokenize", _marking("tokenize"))
    patch.wrap(server, "ModelProvider.load", _marking("load"))


def _marking(origin: str) -> patch.Wrapper:
    """A wrapper that notes on an exception where it was raised: the handler has no other sign."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            error.__dict__.setdefault("_shim_origin", origin)
            error.__dict__.setdefault("_shim_named", args)
            raise

    return wrapper


def _set_completion_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    status = patch.given(wrapped, args, kwargs, "status_code", 0)
    cause = sys.exc_info()[1]
    held = isinstance(instance.wfile, answers.HeldBody)
    if status == NOT_FOUND and isinstance(cause, Exception) and held:
        raise _Answer from cause
    if isinstance(cause, ShimError) and not held:
        # A request that is refused while it is read: stock's except block would say less.
        raise cause
    return wrapped(*args, **kwargs)


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except ShimError as refused:
        _answer(instance, refused, answers.HeldBody(instance.wfile))
        return None


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    instance.wfile = out = answers.HeldBody(instance.wfile)
    try:
        result = wrapped(*args, **kwargs)
        out.release()
    except Exception as error:
        cause = error.__cause__ if isinstance(error, _Answer) and error.__cause__ else error
        gone = isinstance(cause, (ClientGone, BrokenPipeError, ConnectionResetError))
        if gone and not _came_from_engine(cause):
            report.debug("a client has gone")
            instance.close_connection = True
            return None
        _answer(instance, cause, out)
        return None
    finally:
        instance.wfile = out.raw
    return result


def _came_from_engine(cause: BaseException) -> bool:
    """Whether the generation thread raised it: a reset connection may be that of a download."""
    return hasattr(cause, "_shim_origin")


def _answer(handler: Any, cause: BaseException, out: answers.HeldBody) -> None:
    told = _translate(cause)
    if told.status >= 500 and not isinstance(cause, ShimError):  # noqa: PLR2004
        logging.getLogger("mlx_lm.server").error("request failed: %s", cause, exc_info=cause)
    else:
        logging.getLogger("mlx_lm.server").warning(
            "request answered %d: %s", told.status, report.one_line(repr(cause))
        )
    try:
        answers.answer(handler, told, out)
    except OSError as gone:
        report.debug(f"the client has gone before it was answered: {gone!r}")


def _translate(cause: BaseException) -> ShimError:
    if isinstance(cause, ShimError):
        return cause
    origin = getattr(cause, "_shim_origin", None)
    what = f"{type(cause).__name__}: {report.one_line(cause)}"
    if origin == "tokenize":
        return ShimError(
            400, "invalid_request", f"the request cannot be turned into a prompt: {what}"
        )
    if origin == "load":
        return _translate_load(cause, what)
    if engine.generation_is_over or engine.final_error is not None:
        return engine.final_error or errors.engine_dead()
    if origin is None:
        # The handler raised it itself.
        return ShimError(500, "internal_error", f"the answer could not be made: {what}")
    where = getattr(cause, "_shim_where", "")
    return ShimError(
        500, "generation_failed", f"the generation failed{where and ' in '}{where}: {what}"
    )


def _translate_load(cause: BaseException, what: str) -> ShimError:
    named = getattr(cause, "_shim_named", ())
    if any(name is not None and not isinstance(name, str) for name in named):
        return ShimError(
            400, "invalid_request", "model, adapters and draft_model are names and must be strings"
        )
    names = [name for name in named if name not in (None, model_names.DEFAULT)]
    if model_names.is_missing(cause) and not all(Path(name).exists() for name in names):
        return ShimError(404, "model_not_found", report.one_line(cause))
    return ShimError(500, "model_load_failed", f"the model could not be loaded: {what}")
