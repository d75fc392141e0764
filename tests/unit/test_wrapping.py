"""The order of wrappers is part of the design: the table in docs/how-it-works.md is what both lines have."""

from __future__ import annotations

import pytest

from kit.pages import wrapping


@pytest.fixture(scope="module", params=wrapping.LINES)
def layers(request, tmp_path_factory):
    return wrapping.layers(request.param, tmp_path_factory.mktemp("wrapping"))


def test_the_page_has_the_order_of_both_lines(tmp_path):
    assert wrapping.written() == wrapping.table(tmp_path), (
        "python tests/bench/wrapping.py writes it"
    )


# Outer before inner, and why it has to be so.
ORDERS = {
    "what is refused must not have a model downloaded first": (
        "ResponseGenerator.generate",
        "endless_wait",
        "dropped_model",
    ),
    "one model under two names is one, before it is looked at": (
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
    "a refusal for want of memory is answered by wrong_status on do_POST": (
        "APIHandler.do_POST",
        "bad_request",
        "wrong_status",
    ),
    "a refused place is answered by wrong_status": (
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
}


@pytest.mark.parametrize("why", ORDERS)
def test_an_order_that_matters(layers, why):
    function, outer, inner = ORDERS[why]
    order = layers[function]
    assert order.index(outer) < order.index(inner), f"{function}: {' > '.join(order)}"
