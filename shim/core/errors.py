"""What clients are told, in the shape of OpenAI's API, and with which status."""

from __future__ import annotations

from typing import Any

RETRY_AFTER = 10  # seconds; about what a restart and a model of some size take
# The same for an end. Less where the socket outlives the process: who comes back while it restarts waits in its queue.
after_end = RETRY_AFTER


class ShimError(Exception):
    """An answer to one client: a status, OpenAI's type, code and param, and whether waiting helps."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.param = param  # the field of the request that is at fault

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        told = {"message": str(self), "type": kind, "code": self.code}
        return {"error": told if self.param is None else {**told, "param": self.param}}


class ClientGone(Exception):
    """The client closed its connection; there is nobody to tell."""


def engine_dead() -> ShimError:
    return ShimError(
        503,
        "engine_dead",
        "the generation engine has died; the server is about to restart",
        after_end,
    )


def engine_stalled() -> ShimError:
    return ShimError(
        503,
        "engine_stalled",
        "the generation engine has stalled; the server is about to restart",
        after_end,
    )


def shutting_down() -> ShimError:
    return ShimError(503, "shutting_down", "the server is shutting down", after_end)


def draining() -> ShimError:
    return ShimError(
        503, "draining", "the server is about to stop and takes nothing new in", after_end
    )


def model_loading() -> ShimError:
    return ShimError(503, "model_loading", "the model is being loaded", RETRY_AFTER)


def breaker(reason: str, seconds_left: int) -> ShimError:
    return ShimError(503, "breaker", f"the model is not being loaded yet: {reason}", seconds_left)


def memory_pressure() -> ShimError:
    return ShimError(503, "memory_pressure", "the server is short of memory", RETRY_AFTER)


def request_timeout(seconds: float) -> ShimError:
    return ShimError(
        504,
        "request_timeout",
        f"the request took longer than MLX_SHIM_REQUEST_TIMEOUT, {seconds:g} s",
    )


def no_key() -> ShimError:
    return ShimError(
        401,
        "invalid_api_key",
        "this server wants its API key, and only that, in the header Authorization: Bearer KEY",
    )


def invalid(param: str, message: str, code: str = "invalid_value") -> ShimError:
    """A 400 about one field of the request; `message` says what was given and what is accepted."""
    return ShimError(400, code, message, param=param)
