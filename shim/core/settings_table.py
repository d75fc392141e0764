"""The table of settings: one field of `Settings` for each environment variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .values import (
    Limit,
    Wired,
    parse_breaker,
    parse_choice,
    parse_count,
    parse_deadline,
    parse_duration,
    parse_kv_size,
    parse_log_queue,
    parse_memory,
    parse_names,
    parse_optional_size,
    parse_size,
    parse_strict,
    parse_switch,
    parse_wired,
)


def _setting(default: str, kind: str, parse: Callable[[str], Any], meaning: str) -> Any:
    """Make a row of the table. `default` is text as a user writes it; `parse` parses it too."""
    row = {"default": default, "kind": kind, "parse": parse, "meaning": meaning}
    return field(default=parse(default), metadata=row)


@dataclass(frozen=True)
class Settings:
    """The values of all settings. The field `exit_grace` is the variable MLX_SHIM_EXIT_GRACE."""

    strict: int = _setting(
        "0",
        "0, 1 or 2",
        parse_strict,
        "1: the server does not start (78) if a guard that is on is incompatible or failed, or if "
        "a value cannot be parsed. 2: also if a guard is degraded",
    )
    debug: bool = _setting("0", "switch", parse_switch, "more lines on stderr")
    on_death: str = _setting(
        "exit",
        "exit",
        parse_choice("exit"),
        "what happens when the generation thread dies. exit: os._exit(70)",
    )
    exit_grace: float = _setting(
        "1s",
        "duration",
        parse_duration,
        "how long the exit waits, at most, until the waiting clients are told",
    )
    drain: float = _setting(
        "25s",
        "duration",
        parse_duration,
        "after SIGTERM, SIGINT or SIGHUP, requests in flight may finish within this time; 0 means "
        "no wait",
    )
    parent: bool = _setting(
        "0",
        "switch",
        parse_switch,
        "1: the server drains when the process that started it is gone, such as an app or a shell",
    )
    recycle_requests: int = _setting(
        "0",
        "number",
        parse_count,
        "after this many requests the process ends with 75: as soon as it is idle, or at twice as "
        "many by draining; 0 means never",
    )
    recycle_tokens: int = _setting(
        "0",
        "number",
        parse_count,
        "the same after this many tokens, computed for prompts or generated; 0 means never",
    )
    recycle_age: float = _setting(
        "0",
        "duration",
        parse_duration,
        "the same when the model has been up for this long; 0 means never",
    )
    recycle_memory: int = _setting(
        "0",
        "size",
        parse_size,
        "the same when the footprint of the process is this large; 0 means never",
    )
    decode_stall: float = _setting(
        "120s",
        "duration",
        parse_duration,
        "it is a stall if a request whose prompt is done gets no token for this long, and no "
        "prompt of another request explains it; 0 means never",
    )
    prefill_stall: float = _setting(
        "600s",
        "duration",
        parse_duration,
        "it is a stall if the prompt of a request makes no progress for this long; 0 means never",
    )
    on_stall: str = _setting(
        "exit",
        "exit or dump",
        parse_choice("exit", "dump"),
        "what happens at a stall. exit: as at a death. dump: the stacks go to the log, once "
        "for each stall, and /health says stalled",
    )
    request_timeout: float = _setting(
        "0",
        "duration",
        parse_duration,
        "the time limit of a whole request: a longer one gets 504, and the others go on; 0 means "
        "no limit",
    )
    gil_deadline: float = _setting(
        "300s",
        "duration",
        parse_deadline,
        "if the interpreter itself does not run for this long, faulthandler dumps the stacks and "
        "ends the process (status 1); at least 2s; 0 means off",
    )
    while_loading: str = _setting(
        "wait",
        "wait or reject",
        parse_choice("wait", "reject"),
        "wait: a request waits for the model, as with stock. reject: it gets 503 with Retry-After",
    )
    image_fetch: str = _setting(
        "public",
        "public, any or off",
        parse_choice("public", "any", "off"),
        "from where the server fetches an image that a request names by an http(s) URL. public: "
        "public addresses of the internet. any: also this machine and its network. off: nowhere; "
        "data: URLs still work",
    )
    report_dir: str = _setting(
        "",
        "folder",
        str.strip,
        "where crash reports (JSON) are written; the short form always goes to stderr",
    )
    read_timeout: float = _setting(
        "60s",
        "duration",
        parse_duration,
        "the server cuts a client that has not sent its headers within this time, or then sends "
        "its body slower than 500 bytes a second; 0 means no limit",
    )
    max_body: int = _setting("64M", "size", parse_size, "a larger body gets 413; 0 means no limit")
    max_inflight: int = _setting(
        "0",
        "number",
        parse_count,
        "this many requests at a time, one more gets 429; 0 means no limit",
    )
    max_prompt_tokens: int = _setting(
        "0", "number", parse_count, "a longer prompt gets 400; 0 means no limit"
    )
    max_tokens: int = _setting("0", "number", parse_count, "caps max_tokens; 0 means no limit")
    max_context: int = _setting(
        "0",
        "number",
        parse_count,
        "tokens of prompt and completion together: the completion then ends with finish_reason "
        "length; 0 means no limit",
    )
    max_kv_size: int = _setting(
        "0",
        "number",
        parse_kv_size,
        "tokens that a rotating KV cache keeps (docs/http.md says what that does); 0 means no "
        "limit",
    )
    api_key_file: str = _setting(
        "",
        "file",
        str.strip,
        "a file with the key that clients must send as a Bearer token; if the file cannot be used, "
        "the server does not start (78)",
    )
    allowed_models: tuple[str, ...] = _setting(
        "",
        "names",
        parse_names,
        "separated by commas: a request may name only these, and those that the command line names "
        "as model, draft_model or adapters; empty means any",
    )
    # A Limit is a tuple, and so as immutable as the other defaults.
    breaker: Limit | None = _setting(  # noqa: RUF009
        "5/10m",
        "N/duration",
        parse_breaker,
        "after N deaths within this time, the next start waits before it loads the model: 10s, or "
        "the duration after a comma (5/10m,10s), doubled with each further death to at most 10 "
        "minutes; 0 means never",
    )
    state_dir: str = _setting(
        "",
        "folder",
        str.strip,
        "where deaths are recorded; empty means mlx-lm-shim in $XDG_STATE_HOME or ~/.local/state, "
        "on macOS in ~/Library/Application Support",
    )
    launchd_socket: str = _setting(
        "",
        "name",
        str.strip,
        "the key, in the plist's Sockets, of the socket that launchd passes in; systemd's "
        "LISTEN_FDS needs no setting",
    )
    # A Wired is a tuple too.
    wired: Wired | None = _setting(  # noqa: RUF009
        "stock",
        "stock, off, auto, size, share or model+size",
        parse_wired,
        "how much memory mlx_lm may wire at most; stock wires all that Metal recommends. auto: "
        "none while the model is below 60 % of the machine's memory, else model+4G",
    )
    memory_limit: int | None = _setting(
        "stock",
        "size",
        parse_optional_size,
        "for mx.set_memory_limit: above it MLX gives back the freed memory that it keeps (a "
        "guideline, not a cap)",
    )
    cache_limit: int | None = _setting(
        "stock",
        "size",
        parse_optional_size,
        "for mx.set_cache_limit: how much freed memory MLX keeps at most; 0 keeps nothing",
    )
    memory_soft: int = _setting(
        "0",
        "size or share",
        parse_memory,
        "with this much in use the server trims its caches, and then answers new requests with 503 "
        "until it is less; a share such as 80% is of the machine's memory; 0 means off",
    )
    memory_hard: int = _setting(
        "0",
        "size or share",
        parse_memory,
        "with this much in use the server ends the largest requests with an error, and then the "
        "process is replaced (75); a prompt that could not fit below it gets 400; 0 means off",
    )
    log_queue: int = _setting(
        "4M",
        "size",
        parse_log_queue,
        "how much of the log may wait to be written: lines that come while that much waits are "
        "lost, and counted; at least 64K; 0 means off",
    )
    self_check: bool = _setting(
        "1",
        "switch",
        parse_switch,
        "before it says ok, a server with a --model answers one short chat of its own; if that "
        "fails, it ends with 78 and a line that names the option; 0 means no self-check",
    )
    guards_off: frozenset[str] = frozenset()

    def guard_is_on(self, name: str) -> bool:
        """Whether the guard's switch, MLX_SHIM_<NAME>, leaves it on. By default every guard is."""
        return name not in self.guards_off
