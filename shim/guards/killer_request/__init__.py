"""One bad value in a request kills the generation thread, and with it all other requests.

The loop does much of the work for one request outside any try. Here the guard tries that work
first (stop words, sampler, logits processors, segments) inside `_tokenize`, where stock gives an
exception to that request alone. Some values would fail only in the model's own step; an id out of
range even ends the process by a signal there. The guard compares those values with the loaded
model.
"""

from __future__ import annotations

import inspect
from typing import Any

from ...core import patch, report
from ...core.errors import ShimError, invalid
from ...core.verdicts import Incompatible, has, require
from ...engine import anatomy
from . import vocabulary

UPSTREAM = "mlx-lm 1505; each kind in docs/bad-requests.md was seen to kill"
MODULE = "mlx_lm.server"

# Tokens of the prompt that a logits processor is tried with.
TRIED_TOKENS = 8
# Combinations of sampling values that are remembered as tried.
MOST_REMEMBERED = 1000
# Tokens of a model that does not show how many it knows.
ASSUMED_TOKENS = 1 << 20
# Above it stock's sampler fails.
LARGEST_XTC_THRESHOLD = 0.5
# The function that builds automata of the stop strings. Releases before 0.31.2 do not have it.
STOP_MAKER = "ResponseGenerator._make_state_machine"


def probe(server: Any) -> str:
    require(
        server,
        "ResponseGenerator._tokenize(tokenizer, request, args)",
        "_make_sampler",
        "_make_logits_processors",
        "mx.random.state",
    )
    if server.mx.random.key(5 << 32 | 7).tolist() != [5, 7]:
        raise Incompatible("a seed is not the state of mx.random: it could not be put back")
    if has(server, STOP_MAKER):
        return ""
    return f"stop strings are not tried: {server.__name__} has no {STOP_MAKER}"


def apply(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._tokenize", _Rehearsal(server))


class _Rehearsal:
    """A wrapper around `_tokenize(tokenizer, request, args)`."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._tried: set[Any] = set()
        maker = server.ResponseGenerator._make_state_machine if has(server, STOP_MAKER) else None
        self._stop_parameters = inspect.signature(maker).parameters if maker is not None else None

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = wrapped(*args, **kwargs)
        except (Exception, SystemExit, KeyboardInterrupt):
            raise
        # A panic of a tokenizer written in Rust: stock's `except Exception` does not catch it.
        except BaseException as panic:
            told = f"the request cannot be turned into a prompt: {type(panic).__name__}"
            raise ShimError(400, "invalid_request", told) from panic
        try:
            tokenizer = patch.given(wrapped, args, kwargs, "tokenizer", 0)
            asked = patch.given(wrapped, args, kwargs, "args", 2)
            return self._rehearse(instance, result, tokenizer, asked)
        except ShimError:
            raise
        # A mistake of the shim must not refuse a request.
        except Exception as error:
            report.once(f"killer_request cannot rehearse a request: {_what(error)}")
            return result

    def _rehearse(self, instance: Any, result: Any, tokenizer: Any, asked: Any) -> Any:
        # Before 0.31.2 the result is the prompt alone.
        flat = isinstance(result, list)
        try:
            prompt, segments, kinds, state, *rest = (result, [result], None, "") if flat else result
        except (TypeError, ValueError) as error:
            report.mark_failed("killer_request", f"_tokenize returns an unknown shape: {error}")
            return result
        rows = vocabulary.of(anatomy.provider_of(instance).model)
        _check_prompt(prompt, rows.embedding)
        _check_ids(asked, rows.head)
        _check_sampling(asked.sampling, rows.head)
        if self._stop_parameters is not None:
            self._try_stop(instance, tokenizer, asked.stop_words, state)
        self._try_sampling(tokenizer, asked, rows.head)
        self._try_processors(asked, prompt, rows.head)
        if flat:
            return result
        if sum(map(len, segments)) != len(prompt) or not all(segments):
            report.debug("a prompt's segments do not add up: it is served as one")
            segments, kinds = [prompt], ["assistant"]
        return (prompt, segments, kinds, state, *rest)

    def _try_stop(self, generator: Any, tokenizer: Any, stop_words: Any, state: str) -> None:
        named = {"initial_state": state} if "initial_state" in (self._stop_parameters or {}) else {}
        key = anatomy.provider_of(generator).model_key
        try:
            generator._make_state_machine(key, tokenizer, stop_words, **named)
        except Exception as error:
            raise invalid("stop", f"the stop strings cannot be used: {_what(error)}") from error

    def _try_sampling(self, tokenizer: Any, asked: Any, rows: int | None) -> None:
        """Try each combination of values once: stock traces and keeps a function for each."""
        tried = (tuple(vars(asked.sampling).values()), rows)
        if tried in self._tried:
            return
        mx = self.server.mx
        high, low = mx.random.state[0].tolist()
        try:
            self.server._make_sampler(asked, tokenizer)(mx.zeros((1, rows or ASSUMED_TOKENS)))
        except Exception as error:
            told = f"the sampling values cannot be used: {_what(error)}"
            raise ShimError(400, "invalid_value", told) from error
        finally:
            # The tokens of other requests must not depend on this trial.
            mx.random.seed(high << 32 | low)
        if len(self._tried) >= MOST_REMEMBERED:
            self._tried.clear()
        self._tried.add(tried)

    def _try_processors(self, asked: Any, prompt: Any, rows: int | None) -> None:
        mx = self.server.mx
        try:
            logits = mx.zeros((1, rows or ASSUMED_TOKENS))
            for processor in self.server._make_logits_processors(asked):
                logits = processor(mx.array(prompt[-TRIED_TOKENS:]), logits)
        except Exception as error:
            told = f"the penalties or logit_bias cannot be used: {_what(error)}"
            raise ShimError(400, "invalid_value", told) from error


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {report.one_line(error)}"


def _check_prompt(prompt: Any, rows: int | None) -> None:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise ShimError(400, "invalid_value", "the prompt cannot be turned into a list of tokens")
    if not prompt:
        told = "the prompt is empty: it has no token; accepted: at least one"
        raise ShimError(400, "invalid_value", told)
    if rows is not None and not 0 <= min(prompt) <= max(prompt) < rows:
        told = f"the prompt has the token {max(prompt)}; the model knows {rows}"
        raise ShimError(400, "invalid_value", told)


def _check_ids(asked: Any, rows: int | None) -> None:
    if rows is None:
        return
    for token in asked.logits.logit_bias or {}:
        if not 0 <= token < rows:
            told = f"logit_bias has the token id {token}; accepted: 0 to {rows - 1}"
            raise invalid("logit_bias", told)
    if asked.top_logprobs > rows:
        told = f"top_logprobs is {asked.top_logprobs}; accepted: at most {rows}"
        raise invalid("top_logprobs", told)


def _check_sampling(sampling: Any, rows: int | None) -> None:
    """Refuse what stock's sampler refuses only when it first runs, in the model's step."""
    if not sampling.temperature:
        # Greedy: stock does not look at the other values.
        return
    if rows is not None and sampling.top_k >= rows:
        accepted = f"0 to {rows - 1}, the model's tokens less one"
        raise invalid("top_k", f"top_k is {sampling.top_k}; accepted: {accepted}")
    if sampling.xtc_probability and sampling.xtc_threshold > LARGEST_XTC_THRESHOLD:
        told = f"xtc_threshold is {sampling.xtc_threshold:g}"
        raise invalid("xtc_threshold", f"{told}; accepted: 0 to {LARGEST_XTC_THRESHOLD:g}")
