"""A guard retires where stock behaves without the defect. A guard that cannot tell does not act."""

from __future__ import annotations

import types
from http.server import ThreadingHTTPServer

import pytest
from mlx_lm import server as stock_server
from mlx_lm.models import cache as stock

from shim.core.verdicts import Incompatible, Retired
from shim.guards import (
    empty_model_list,
    exact_cache_hit,
    missing_include_usage,
    quadratic_search,
    short_backlog,
)


def module(original, **cured):
    return types.SimpleNamespace(**{**vars(original), "__name__": original.__name__, **cured})


class Replaying(stock.LRUPromptCache):
    def fetch_nearest_cache(self, model, tokens):
        found, rest = super().fetch_nearest_cache(model, tokens)
        return found, rest or tokens[-1:]


class Linear(stock.PromptTrie):
    def search(self, model, tokens):
        return quadratic_search.searching(stock.PromptTrieResult)(self, model, tokens)


class Different(stock.PromptTrie):
    def search(self, model, tokens):
        found = super().search(model, tokens)
        return stock.PromptTrieResult(model, found.exact, None, found.longer, found.common_prefix)


class Handler(stock_server.APIHandler):
    def handle_completion(self, request, stop_words):
        _ctx, response = self.response_generator.generate(request, stop_words)
        assert list(response) == []
        assert not self.stream_options.get("include_usage", False)
        self.wfile.write(b"data: [DONE]\n\n")

    def handle_models_request(self):
        self.wfile.write(b'{"object": "list", "data": []}')


class Listener(ThreadingHTTPServer):
    request_queue_size = 128


def run_http_server(host, port, response_generator, server_class=Listener):
    server_class((host, port), Handler).serve_forever()


def test_stock_has_the_defects():
    for guard in (exact_cache_hit, quadratic_search):
        guard.probe(stock)
    for guard in (missing_include_usage, empty_model_list, short_backlog):
        guard.probe(stock_server)


@pytest.mark.parametrize(
    ("guard", "cured"),
    [
        (exact_cache_hit, module(stock, LRUPromptCache=Replaying)),
        (quadratic_search, module(stock, PromptTrie=Linear)),
        (missing_include_usage, module(stock_server, APIHandler=Handler)),
        (empty_model_list, module(stock_server, APIHandler=Handler)),
        (short_backlog, module(stock_server, _run_http_server=run_http_server)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cure_retires_its_guard(guard, cured):
    with pytest.raises(Retired):
        guard.probe(cured)


def test_a_search_that_finds_something_else_is_left_alone():
    with pytest.raises(Incompatible, match=r"PromptTrie.search finds .* was expected"):
        quadratic_search.probe(module(stock, PromptTrie=Different))


def test_the_probes_leave_logging_alone():
    """The first `logging.debug` sets logging up, and the server's own set-up would do nothing."""
    names = {"debug", "info", "warning", "error", "exception"}
    quiet = types.SimpleNamespace(
        **dict.fromkeys(names, lambda *_, **__: pytest.fail("the probe logs"))
    )
    missing_include_usage.probe(module(stock_server, logging=quiet))


def test_what_goes_wrong_with_a_hit_is_computed_anew(capfd):
    answers = iter([("a cache", [])])
    tokens = [1, 2, 3]
    assert exact_cache_hit._fetch(lambda *_: next(answers), None, ("model", tokens), {}) == (
        None,
        tokens,
    )
    assert "computed again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        # An entry of all but the last token.
        (("cache", []), 1),
        (("cache", [2]), 2),
        # Nothing of the entry is left.
        (("cache", [1, 2]), None),
        ((None, [1, 2]), None),
    ],
)
def test_the_rest_is_never_empty(second, expected):
    answers = iter([("a cache", []), second])
    tokens = [1, 2, 3]
    found, rest = exact_cache_hit._fetch(
        lambda *_, **__: next(answers), None, (), {"model": "m", "tokens": tokens}
    )
    assert rest == (tokens if expected is None else tokens[-expected:])
    assert found == (None if expected is None else "cache")


def test_a_cache_that_is_shorter_than_its_key_is_not_used():
    """Stock stores such caches where it has a draft model."""
    answers = iter([("a cache", []), ([types.SimpleNamespace(offset=1)], [])])
    tokens = [1, 2, 3]
    assert exact_cache_hit._fetch(lambda *_: next(answers), None, ("model", tokens), {}) == (
        None,
        tokens,
    )


def test_other_answers_are_stocks():
    answer = ("a cache", [3])
    assert exact_cache_hit._fetch(lambda *_: answer, None, ("model", [1, 2, 3]), {}) == answer
    assert exact_cache_hit._fetch(lambda *_: ("a cache", []), None, ("model", []), {}) == (
        "a cache",
        [],
    )
