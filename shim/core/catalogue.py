"""The names of the guards, in the order in which the shim applies them.

Each is a module of shim/guards/, or a folder there if it has helpers of its own. If two guards of
the same module of mlx_lm wrap the same function, the later one is the outer one.
docs/how-it-works.md has a table of these, and a test checks it.
"""

from __future__ import annotations

GUARDS = (
    "generation_death",
    "orphaned_process",
    "abandoned_request",
    "stall",
    "frozen_interpreter",
    "nested_xtc_tokens",
    "killer_request",
    "unlimited_tokens",
    "unlimited_queue",
    "wrong_status",
    "bad_request",
    "unbounded_body",
    "slow_client",
    "shared_fault",
    "untruthful_health",
    "leaking_advance",
    "leaking_offset",
    "pinned_batch",
    "overfull_prompt_cache",
    "leftover_cache",
    "unreturned_weights",
    "request_forgery",
    "misfiled_cache",
    "exact_cache_hit",
    "mixed_processors",
    "quadratic_search",
    "missing_include_usage",
    "empty_model_list",
    "open_door",
    "dropped_model",
    "needless_reload",
    "any_model",
    "endless_wait",
    "abrupt_stop",
    "deserted_server",
    "grown_process",
    "overwired_memory",
    "hoarded_buffers",
    "exhausted_memory",
    "unaffordable_prompt",
    "unseen_by_systemd",
    "crash_loop",
    "unproven_model",
    "untried_engine",
    "short_backlog",
    "refused_while_down",
    # Wraps nothing: it begins when a server starts, before the first line is written.
    "blocking_log",
)
# The shim promises that the server answers, says that it cannot, or exits. Without any one of
# these guards the promise does not hold.
HEART = (
    "generation_death",
    "stall",
    "endless_wait",
    "frozen_interpreter",
    "untruthful_health",
    "abrupt_stop",
)
