"""The order of wrappers is part of the design. docs/how-it-works.md has it for both lines."""

from __future__ import annotations

import pytest

from kit.pages import wrapping


@pytest.fixture(scope="module", params=wrapping.LINES)
def layers(request, tmp_path_factory):
    return wrapping.layers(request.param, tmp_path_factory.mktemp("wrapping"))


def test_the_page_has_the_order_of_both_lines(tmp_path):
    assert wrapping.written() == wrapping.table(tmp_path), "run python tests/bench/wrapping.py"


# Why a wrapper must be outside another one: the function, the outer, the inner.
ORDERS = {
    "a refused request must not download a model first": (
        "ResponseGenerator.generate",
        "endless_wait",
        "dropped_model",
    ),
    "one model under two names becomes one name before it is checked": (
        "ResponseGenerator.generate",
        "needless_reload",
        "dropped_model",
    ),
    "a body is bounded before it is read": ("APIHandler.do_POST", "unbounded_body", "bad_request"),
    "a deadline is set before anything is read": (
        "APIHandler.do_POST",
        "slow_client",
        "unbounded_body",
    ),
    "no body is read while the process ends": ("APIHandler.do_POST", "drain", "slow_client"),
    "wrong_status on do_POST answers a refusal for lack of memory": (
        "APIHandler.do_POST",
        "bad_request",
        "wrong_status",
    ),
    "wrong_status answers a refusal of unlimited_queue": (
        "APIHandler.handle_completion",
        "wrong_status",
        "unlimited_queue",
    ),
    "a client that has left is seen before its text is tried": (
        "ResponseGenerator._tokenize",
        "killer_request",
        "abandoned_request",
    ),
    "an entry owns its bytes before they are counted": (
        "LRUPromptCache.insert_cache",
        "overfull_prompt_cache",
        "pinned_batch",
    ),
    "an entry that cannot be counted is left out before it is copied": (
        "LRUPromptCache.insert_cache",
        "shared_fault",
        "pinned_batch",
    ),
    "a load in progress is known while the shim waits for memory": (
        "ModelProvider.load_default",
        "observe",
        "crash_loop",
    ),
    "the self-check begins when the start has waited": (
        "ModelProvider.load_default",
        "unproven_model",
        "crash_loop",
    ),
    "the caches of an own request are taken before they are counted": (
        "LRUPromptCache.insert_cache",
        "own_request",
        "unaffordable_prompt",
    ),
    "a server class that is not stock's counts as a program's, which handles its sockets itself": (
        "mlx_lm.server._run_http_server",
        "refused_while_down",
        "short_backlog",
    ),
}


@pytest.mark.parametrize("why", ORDERS)
def test_an_order_that_matters(layers, why):
    function, outer, inner = ORDERS[why]
    order = layers[function]
    assert order.index(outer) < order.index(inner), f"{function}: {' > '.join(order)}"
