"""Every environment variable the shim reads, in one table: the fields of `Settings`, and a switch for each guard."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .catalogue import GUARDS
from .values import (
    OFF,
    ON,
    Limit,
    Wired,
    parse_breaker,
    parse_choice,
    parse_count,
    parse_deadline,
    parse_duration,
    parse_kv_size,
    parse_memory,
    parse_names,
    parse_optional_size,
    parse_size,
    parse_strict,
    parse_switch,
    parse_wired,
)

PREFIX = "MLX_SHIM"
KILL_SWITCH = PREFIX


def _setting(
    default: str, kind: str, parse: Callable[[str], Any], meaning: str, guard: str = ""
) -> Any:
    """A row of the table. `default` is written as a user would write it, and parsed by the same parser."""
    row = {"default": default, "kind": kind, "parse": parse, "meaning": meaning, "guard": guard}
    return field(default=parse(default), metadata=row)


@dataclass(frozen=True)
class Settings:
    """The settings in force. A field `exit_grace` is the variable MLX_SHIM_EXIT_GRACE."""

    strict: int = _setting(
        "0", "0, 1 or 2", parse_strict,
        "1: a guard that is on but incompatible or failed, or a value that cannot be parsed, stops the server at start "
        "(78). 2: a guard that is degraded does so too",
    )  # fmt: skip
    debug: bool = _setting("0", "switch", parse_switch, "more lines on stderr")
    on_death: str = _setting(
        "exit", "exit", parse_choice("exit"),
        "what to do when the generation thread dies. exit: os._exit(70)", "generation_death",
    )  # fmt: skip
    exit_grace: float = _setting(
        "1s", "duration", parse_duration,
        "at most this long for waiting clients to be told before the exit", "generation_death",
    )  # fmt: skip
    drain: float = _setting(
        "25s", "duration", parse_duration,
        "asked to stop by SIGTERM or SIGINT, those in flight may finish within this; 0 is not to wait", "abrupt_stop",
    )  # fmt: skip
    recycle_requests: int = _setting(
        "0", "number", parse_count,
        "after so many requests the process ends with 75 when it is idle, at twice as many by draining; 0 is never",
        "grown_process",
    )  # fmt: skip
    recycle_tokens: int = _setting(
        "0", "number", parse_count, "likewise after so many tokens, of prompts computed and made; 0 is never",
        "grown_process",
    )  # fmt: skip
    recycle_age: float = _setting(
        "0",
        "duration",
        parse_duration,
        "likewise when its model has been up for so long; 0 is never",
        "grown_process",
    )
    recycle_memory: int = _setting(
        "0",
        "size",
        parse_size,
        "likewise when its footprint is so large; 0 is never",
        "grown_process",
    )
    decode_stall: float = _setting(
        "120s", "duration", parse_duration,
        "a request that is past its prompt got no token for this long, and no prompt of others explains it; 0 is none",
        "stall",
    )  # fmt: skip
    prefill_stall: float = _setting(
        "600s",
        "duration",
        parse_duration,
        "a request in its prompt made no progress for this long; 0 is none",
        "stall",
    )
    on_stall: str = _setting(
        "exit", "exit or dump", parse_choice("exit", "dump"),
        "exit: as a death. dump: stacks to the log, once an episode, and /health says stalled", "stall",
    )  # fmt: skip
    request_timeout: float = _setting(
        "0", "duration", parse_duration, "limit for a whole request, 0 is none; ends that request alone, with 504",
        "endless_wait",
    )  # fmt: skip
    gil_deadline: float = _setting(
        "300s", "duration", parse_deadline,
        "the interpreter itself has not run for this long: faulthandler dumps the stacks and ends it (status 1); at least 2s, or "
        "0: off",
        "frozen_interpreter",
    )  # fmt: skip
    while_loading: str = _setting(
        "wait", "wait or reject", parse_choice("wait", "reject"),
        "wait: a request waits for the model, as with stock. reject: 503 with Retry-After", "endless_wait",
    )  # fmt: skip
    image_fetch: str = _setting(
        "public", "public, any or off", parse_choice("public", "any", "off"),
        "whence an image named by an http(s) URL is fetched. public: public addresses of the internet. any: also this "
        "machine and its network. off: nowhere; data: URLs still work", "request_forgery",
    )  # fmt: skip
    report_dir: str = _setting(
        "",
        "folder",
        str.strip,
        "where a crash report (JSON) is written; always to stderr in short",
        "generation_death",
    )
    read_timeout: float = _setting(
        "60s", "duration", parse_duration,
        "a client that has not sent its headers by then, or then sends its body slower than 500 bytes a second, is cut; "
        "0 is none", "slow_client",
    )  # fmt: skip
    max_body: int = _setting(
        "64M", "size", parse_size, "a larger body is 413; 0 is no limit", "unbounded_body"
    )
    max_inflight: int = _setting(
        "0",
        "number",
        parse_count,
        "so many requests at a time, one more is 429; 0 is no limit",
        "unlimited_queue",
    )
    max_prompt_tokens: int = _setting(
        "0", "number", parse_count, "a longer prompt is 400; 0 is no limit", "unlimited_tokens"
    )
    max_tokens: int = _setting(
        "0", "number", parse_count, "caps max_tokens; 0 is no limit", "unlimited_tokens"
    )
    max_context: int = _setting(
        "0", "number", parse_count,
        "prompt and completion together: the completion ends with finish_reason length; 0 is no limit",
        "unlimited_tokens",
    )  # fmt: skip
    max_kv_size: int = _setting(
        "0", "number", parse_kv_size,
        "tokens a rotating KV cache keeps (docs/limits.md says what that does); 0 is no limit", "unlimited_tokens",
    )  # fmt: skip
    api_key_file: str = _setting(
        "", "file", str.strip,
        "a file with the key that clients must bring as a Bearer token; a file that cannot be used stops the server at "
        "start (78)", "open_door",
    )  # fmt: skip
    allowed_models: tuple[str, ...] = _setting(
        "", "names", parse_names,
        "separated by commas: requests may name only these, and what the command line names, as model, draft_model or "
        "adapters; empty is any", "any_model",
    )  # fmt: skip
    breaker: Limit | None = _setting(  # noqa: RUF009 - a tuple, as immutable as the others
        "5/10m", "N/duration", parse_breaker,
        "after so many deaths within this long the next start waits before it loads the model: 10s, or the duration after "
        "a comma (5/10m,10s), doubled with each further death to at most 10 minutes; 0 is none", "crash_loop",
    )  # fmt: skip
    state_dir: str = _setting(
        "", "folder", str.strip,
        "where deaths are noted; empty is mlx-lm-shim in $XDG_STATE_HOME or ~/.local/state, on macOS in "
        "~/Library/Application Support", "crash_loop",
    )  # fmt: skip
    launchd_socket: str = _setting(
        "", "name", str.strip,
        "the key in the plist's Sockets of the socket that launchd passes in; systemd's LISTEN_FDS needs no setting",
        "refused_while_down",
    )  # fmt: skip
    wired: Wired | None = _setting(  # noqa: RUF009 - a tuple, as immutable as the others
        "stock", "stock, off, auto, size, share or model+size", parse_wired,
        "how much memory mlx_lm may wire at most, where stock wires all that Metal recommends. auto: none while the model "
        "is below 60 % of the machine's memory, else model+4G", "overwired_memory",
    )  # fmt: skip
    memory_limit: int | None = _setting(
        "stock", "size", parse_optional_size,
        "for mx.set_memory_limit: above it MLX gives back what it has kept (a guideline, not a cap)", "hoarded_buffers",
    )  # fmt: skip
    cache_limit: int | None = _setting(
        "stock", "size", parse_optional_size,
        "for mx.set_cache_limit: what MLX keeps at most of freed memory; 0 keeps nothing", "hoarded_buffers",
    )  # fmt: skip
    memory_soft: int = _setting(
        "0", "size or share", parse_memory,
        "with so much in use caches are trimmed, and then new requests are 503 until it is less; 80% is of the machine's "
        "memory; 0 is off", "exhausted_memory",
    )  # fmt: skip
    memory_hard: int = _setting(
        "0", "size or share", parse_memory,
        "with so much in use the largest requests are ended with an error, and then the process is replaced (75); a prompt "
        "that could not fit below it is 400; 0 is off", "exhausted_memory",
    )  # fmt: skip
    self_check: bool = _setting(
        "1", "switch", parse_switch,
        "before it says ready, a server with a --model answers one short chat of its own; where that fails it ends with 78 "
        "and a line that names the option; 0: it does not", "unproven_model",
    )  # fmt: skip
    guards_off: frozenset[str] = frozenset()

    def guard_is_on(self, name: str) -> bool:
        """Whether the guard's own switch, MLX_SHIM_<NAME>, leaves it on. Every guard is on by default."""
        return name not in self.guards_off


@dataclass(frozen=True)
class Row:
    """One variable as the documentation and `doctor` list it."""

    variable: str
    kind: str
    default: str
    meaning: str
    guard: str


def table() -> list[Row]:
    """Every variable: the kill switch, the settings, then a switch for each guard."""
    rows = [
        Row(
            KILL_SWITCH,
            "switch",
            "1",
            "the kill switch: 0 leaves Python as if the folder were not on PYTHONPATH",
            "",
        )
    ]
    for f in fields(Settings):
        if f.metadata:
            meta = f.metadata
            rows.append(
                Row(variable(f.name), meta["kind"], meta["default"], meta["meaning"], meta["guard"])
            )
    rows += [
        Row(variable(name), "switch", "1", f"0 turns the guard {name} off", name) for name in GUARDS
    ]
    return rows


def variable(name: str) -> str:
    """The environment variable of a setting or a guard."""
    return f"{PREFIX}_{name.upper()}"


def load(environ: Mapping[str, str] = os.environ) -> tuple[Settings, list[str], list[str]]:
    """The settings in `environ`; a line for each value that cannot be parsed; a line for each name nobody knows."""
    values: dict[str, Any] = {}
    off: set[str] = set()
    bad: list[str] = []

    def read(name: str, parse: Callable[[str], Any], default: str) -> Any:
        raw = environ.get(variable(name), "")
        if not raw.strip():
            return parse(default)
        try:
            return parse(raw)
        except ValueError as error:
            bad.append(
                f"{variable(name)}={raw!r} is not valid; {error}; using the default {default}"
            )
            return parse(default)

    for f in fields(Settings):
        if f.metadata:
            values[f.name] = read(f.name, f.metadata["parse"], f.metadata["default"])
    for guard in GUARDS:
        if not read(guard, parse_switch, "1"):
            off.add(guard)
    raw = environ.get(KILL_SWITCH, "")
    if raw.strip() and raw.strip().lower() not in (*ON, *OFF):
        bad.append(
            f"{KILL_SWITCH}={raw!r} is not valid; accepted: {', '.join((*ON, *OFF))}; the shim stays on"
        )
    known = [row.variable for row in table()]
    unknown = [
        f"{name} is not a setting of the shim; the nearest known name is {difflib.get_close_matches(name, known, 1, 0)[0]}"
        for name in sorted(environ)
        if name.startswith(PREFIX + "_") and name not in known
    ]
    return Settings(**values, guards_off=frozenset(off)), bad, unknown


current: Settings = Settings()


def in_force(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Each variable that differs from its default, and its value as it was given."""
    found = []
    for f in fields(Settings):
        given = environ.get(variable(f.name), "").strip() if f.metadata else ""
        if given and getattr(current, f.name) != f.default:
            found.append((variable(f.name), "set" if f.metadata["kind"] == "file" else given))
    return found


def is_set(name: str) -> bool:
    """Whether a setting asks for anything: 0 and empty do not, but where the default is stock's own value 0 is one too."""
    default = next(f.default for f in fields(Settings) if f.name == name)
    value = getattr(current, name)
    return bool(value) or (default is None and value is not None)
