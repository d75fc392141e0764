"""The errors that clients get, in the shape of OpenAI's API, each with its HTTP status."""

from __future__ import annotations

from typing import Any

# Seconds; about as long as a restart and the load of a larger model take.
RETRY_AFTER = 10
# Seconds, for an error that says the process ends. A guard makes it shorter where the socket
# outlives the process: a client that comes back during the restart waits in the socket's queue.
after_end = RETRY_AFTER


class ShimError(Exception):
    """An answer to one client: status, OpenAI's type, code and param, and when to try again."""

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
        # The field of the request that is at fault.
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        told = {"message": str(self), "type": kind, "code": self.code}
        return {"error": told if self.param is None else {**told, "param": self.param}}


class ClientGone(Exception):
    """The client has closed its connection, so no answer is needed."""


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
        503, "draining", "the server is about to stop and takes no new requests", after_end
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
        "this server requires exactly its API key in the header Authorization: Bearer KEY",
    )


def invalid(param: str, message: str, code: str = "invalid_value") -> ShimError:
    """Make a 400 for one field of the request.

    `message` says what the client gave and what the server accepts.
    """
    return ShimError(400, code, message, param=param)
