"""Random requests for both fuzzers, and the oracle: what a server may do with any of them."""

from __future__ import annotations

import http.client
import json
import socket
import string
import threading
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from kit.bad_requests import CASES
from kit.streams import Stream

if TYPE_CHECKING:
    from kit.harness import Server

PATHS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")

# Good, bad and absurd values of each kind. Good sampling values are few: MLX compiles each new one,
# which takes a second.
huge = st.sampled_from([2**31, 2**53, 2**63, 2**64, 2**80, 10**80, -(2**63), -(10**80)])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    huge,
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(["", "0", "-1", "1.5", "NaN", "\ud800", "\x00", "a" * 5000]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
words = st.text(st.sampled_from(string.ascii_letters + " éß漢😀\n"), min_size=1, max_size=12)
parts = st.one_of(
    words.map(lambda text: {"type": "text", "text": text}),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
            {"type": "text"},
            {},
        ]
    ),
    anything,
)
calls = st.sampled_from(
    [
        None,
        [],
        [{"function": {"name": "f", "arguments": "{}"}}],
        [{"function": {"arguments": "{"}}],
        "x",
        [1],
        [{}],
    ]
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool"]),
        "content": st.one_of(words, words, st.none()),
    },
    optional={"tool_calls": calls},
) | st.fixed_dictionaries(
    {"role": words | anything, "content": st.lists(parts, max_size=2) | anything}
)


def field(*good: Any) -> st.SearchStrategy[Any]:
    """A good value three times in four, else anything."""
    return st.one_of(*[st.sampled_from(good)] * 3, anything)


_fields: dict[str, st.SearchStrategy[Any]] = {
    "stream": field(False, True),
    "stream_options": field(None, {}, {"include_usage": True}, {"include_usage": None}),
    "model": field("default_model", "no/such-model", "/no/such/model", ""),
    "draft_model": field("default_model", None),
    "adapters": field(None, "no/such-adapter"),
    "num_draft_tokens": field(0, 3),
    "max_completion_tokens": field(None, 1, 3),
    "temperature": field(0, 0.0, 1.0, 1),
    "top_p": field(1, 0.9),
    "top_k": field(0, 5, 256, 257, 300),
    "min_p": field(0.0, 0.05),
    "repetition_penalty": field(0.0, 1.2),
    "repetition_context_size": field(0, 20, 2**31 - 1),
    "presence_penalty": field(0.0, 1.0),
    "presence_context_size": field(0, 20),
    "frequency_penalty": field(0.0, -1),
    "frequency_context_size": field(1, 20),
    "xtc_probability": field(0.0, 0.5),
    "xtc_threshold": field(0.1, 0.4, 0.9),
    "logit_bias": field(None, {}, {"5": 1.0}, {"256": -5}, {"257": 1}, {"-1": 1}),
    "logprobs": field(True, False),
    "top_logprobs": field(-1, 0, 3, 11),
    "seed": field(None, 0, 2**64 - 1),
    "chat_template_kwargs": field(None, {}, {"enable_thinking": True}, {"return_dict": True}),
    "stop": field(None, [], "a", ["a", "bc"], [""], ""),
    "tools": field(None, [], [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    "role_mapping": field(None, {}, {"user": "U: "}),
    "unknown": anything,
}


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    """A path and a body: each field good or not, and sometimes one of the known bad requests."""
    if draw(st.integers(0, 9)) == 0:
        case = draw(st.sampled_from(CASES))
        return case.path, case.raw
    body = draw(st.fixed_dictionaries({}, optional={name: _fields[name] for name in draw(_names)}))
    body["max_tokens"] = draw(
        st.one_of(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), scalars.filter(_small))
    )
    path = draw(st.sampled_from(PATHS))
    if path == PATHS[0]:
        body["prompt"] = draw(st.one_of(words, words, words, anything))
    else:
        body["messages"] = draw(
            st.one_of(*[st.lists(messages, min_size=1, max_size=3)] * 3, anything)
        )
    return path, json.dumps(body).encode()


_names = st.lists(st.sampled_from(sorted(_fields)), max_size=6, unique=True)


def _small(value: Any) -> bool:
    """Whether it is not a huge number of tokens, which is valid and takes long."""
    return not isinstance(value, int) or value < 100


def judge(server: Server, path: str, raw: bytes) -> int:
    """Send it, check that a client can work with the answer, and return the status."""
    shown = f"{path} {raw[:1500]!r}"
    try:
        status, answer = server.post(raw, path, timeout=60)
    except (OSError, http.client.HTTPException) as error:
        raise AssertionError(f"{shown}: {error!r}\n{server.text()[-3000:]}") from error
    if status == 200:
        text = answer if isinstance(answer, str) else ""
        assert "error" not in text, f"{shown}: {text[-500:]}"
        assert not text or text.endswith("data: [DONE]\n\n"), f"{shown}: {text[-500:]}"
        return status
    error = answer["error"] if isinstance(answer, dict) else {}
    allowed = status == 400 or (status == 404 and error.get("code") == "model_not_found")
    assert allowed, f"{shown}: {status} {answer}\n{server.text()[-3000:]}"
    assert error.get("message"), f"{shown}: {status} {answer}"
    assert len(error["message"]) < 600, f"{shown}: {status} {answer}"
    return status


NORMAL = [{"prompt": f"{n} normal {n}", "max_tokens": 60, "temperature": 0.0} for n in range(4)]


def normal_texts(server: Server) -> list[str]:
    streams = [Stream(server, body) for body in NORMAL]
    return [_in_the_end(server, stream.join()).text for stream in streams]


def _in_the_end(server: Server, stream: Stream) -> Stream:
    """Ask again after a 408: a busy machine may be too slow for a short MLX_SHIM_READ_TIMEOUT."""
    for _ in range(5):
        if stream.status == 408:
            stream = Stream(server, stream.body).join()
    return stream


class Beside:
    """Four normal streams, again and again in the background.

    Each must have the tokens of the stock server.
    """

    def __init__(self, server: Server, wanted: list[str]) -> None:
        self.rounds = 0
        self._server, self._wanted = server, wanted
        self._over = threading.Event()
        self._wrong: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set() and not self._wrong:
            got = normal_texts(self._server)
            self.rounds += 1
            if got != self._wanted:
                self._wrong.append(got)
            # Leaves most of the machine to the fuzzer.
            self._over.wait(0.3)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *failed: object) -> None:
        self._over.set()
        self._thread.join(90)
        assert failed[0] is not None or not self._wrong, (
            f"{self._wrong[0]} instead of {self._wanted}"
        )


# Pieces of a request as it goes over the wire.
methods = st.sampled_from(
    ["POST", "POST", "POST", "GET", "OPTIONS", "HEAD", "PUT", "post", "", "P\x00ST", "X" * 300]
)
targets = st.sampled_from(
    [
        *PATHS,
        *PATHS,
        "/health",
        "/v1/models",
        "/",
        "",
        "http://x/v1/completions",
        "/" + "a" * 70_000,
    ]
)
versions = st.sampled_from(
    ["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9", "", "X"]
)
lines = st.sampled_from(
    [
        b"Host: x",
        b"Connection: keep-alive",
        b"Connection: close",
        b"Transfer-Encoding: chunked",
        b"Content-Length: 3",
        b"Transfer-Encoding: identity",
        b"Expect: 100-continue",
        b"Content-Length: -1",
        b"Content-Length: 99999999999999",
        b"X: " + b"a" * 70_000,
        b"no colon",
        b": empty",
        b" folded",
        b"X:\x00\xff\xfe",
        b"Origin: http://evil\r",
        b"X: y\nZ: z",
    ]
)


@st.composite
def wires(draw: Any) -> tuple[list[bytes], bool]:
    """Pieces to send one after another, and whether to close the sending half after them."""
    body = draw(st.one_of(bodies().map(lambda item: item[1]), st.binary(max_size=200)))
    claimed = len(body) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 100, -len(body)]))
    length = draw(
        st.sampled_from([f"Content-Length: {claimed}".encode()] * 6 + [b"Content-Length: x"])
    )
    fields = draw(st.lists(lines, max_size=3)) * draw(st.sampled_from([1, 1, 1, 60]))
    start = " ".join([draw(methods), draw(targets), draw(versions)]).encode()
    head = b"\r\n".join([start, *fields, length, b"", b""])
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(head) - 1))
        head = head[:at] + bytes([draw(st.integers(0, 255))]) + head[at + 1 :]
    # Two requests are pipelined.
    whole = (head + body) * draw(st.sampled_from([1, 1, 1, 2]))
    whole = whole[
        : draw(st.sampled_from([len(whole)] * 3 + [len(whole) // 2, len(head) - 2, len(head)]))
    ]
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)], draw(
        st.booleans()
    )


def judge_wire(server: Server, pieces: list[bytes], half_close: bool, patience: float) -> bytes:
    """Send them. The server must hang up in time, with a proper answer or with none."""
    answer = b""
    shown = [piece[:300] for piece in pieces]
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience) as s:
        try:
            for piece in pieces:
                s.sendall(piece)
            if half_close:
                s.shutdown(socket.SHUT_WR)
            while piece := s.recv(65536):
                answer += piece
        except TimeoutError:
            raise AssertionError(
                f"{shown}: still open after {patience} s, answered {answer[:300]!r}"
            ) from None
        except OSError:
            # The server has hung up while the fuzzer still sends.
            pass
    if answer.startswith(b"HTTP/"):
        status = int(answer.split(None, 2)[1])
        # 501 and 505 come from http.server itself.
        allowed = status in {200, 204, 400, 404, 408, 411, 413, 414, 431, 501, 505}
        assert allowed, f"{shown}: {answer[:600]!r}\n{server.text()[-2000:]}"
    return answer
