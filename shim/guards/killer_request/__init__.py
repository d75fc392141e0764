"""What the generation loop does for one request runs outside any try, and one bad value in it kills the thread for all.

Here everything that will be done for the request (stop words, sampler, logits processors, segments) is tried first
inside `_tokenize`, whose exceptions stock gives to that request alone; and what would fail only in the model's own step,
where an id out of range even ends the process by a signal, is checked by value against the loaded model.
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

CONTEXT = 8  # tokens of the prompt that a logits processor is tried with
MAKES_STOP = "ResponseGenerator._make_state_machine"
KNOWN = 1000  # sampling parameters remembered as tried


def probe(server: Any) -> str:
    require(
        server, "ResponseGenerator._tokenize(tokenizer, request, args)", "_make_sampler", "_make_logits_processors",
        "mx.random.state",
    )  # fmt: skip
    if server.mx.random.key(5 << 32 | 7).tolist() != [5, 7]:
        raise Incompatible("a seed is not the state of mx.random: it could not be put back")
    return (
        ""
        if has(server, MAKES_STOP)
        else f"stop strings are not tried: {server.__name__} has no {MAKES_STOP}"
    )


def apply(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._tokenize", _Rehearsal(server))


class _Rehearsal:
    """A wrapper around `_tokenize(tokenizer, request, args)`."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._tried: set[Any] = set()
        # Releases before 0.31.2 have no function for this.
        makes = server.ResponseGenerator._make_state_machine if has(server, MAKES_STOP) else None
        self._stop_parameters = inspect.signature(makes).parameters if makes is not None else None

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = wrapped(*args, **kwargs)
        except (Exception, SystemExit, KeyboardInterrupt):
            raise
        except (
            BaseException
        ) as panic:  # of a tokenizer written in Rust: stock's `except Exception` lets it through
            told = f"the request cannot be turned into a prompt: {type(panic).__name__}"
            raise ShimError(400, "invalid_request", told) from panic
        try:
            return self._rehearse(instance, result, args, kwargs)
        except ShimError:
            raise
        except Exception as error:  # a mistake of ours refuses nobody
            report.once(f"killer_request cannot rehearse a request: {_what(error)}")
            return result

    def _rehearse(self, instance: Any, result: Any, args: Any, kwargs: Any) -> Any:
        call = dict(zip(("tokenizer", "request", "args"), args, strict=False)) | kwargs
        tokenizer, asked = call["tokenizer"], call["args"]
        flat = isinstance(result, list)  # before 0.31.2: the prompt, and no more
        try:
            prompt, segments, kinds, state, *rest = (result, [result], None, "") if flat else result
        except (TypeError, ValueError) as error:
            report.mark_failed(
                "killer_request", f"_tokenize returns another shape than is known: {error}"
            )
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
        try:
            generator._make_state_machine(
                anatomy.provider_of(generator).model_key, tokenizer, stop_words, **named
            )
        except Exception as error:
            raise invalid("stop", f"the stop strings cannot be used: {_what(error)}") from error

    def _try_sampling(self, tokenizer: Any, asked: Any, rows: int | None) -> None:
        """Each combination of values once: to try one traces a function that stock compiles, and keeps."""
        tried = (tuple(vars(asked.sampling).values()), rows)
        if tried in self._tried:
            return
        mx = self.server.mx
        high, low = mx.random.state[0].tolist()
        try:
            self.server._make_sampler(asked, tokenizer)(mx.zeros((1, rows or 1 << 20)))
        except Exception as error:
            raise ShimError(
                400, "invalid_value", f"the sampling values cannot be used: {_what(error)}"
            ) from error
        finally:
            mx.random.seed(
                high << 32 | low
            )  # nobody's tokens depend on what was tried for somebody else
        if len(self._tried) >= KNOWN:
            self._tried.clear()
        self._tried.add(tried)

    def _try_processors(self, asked: Any, prompt: Any, rows: int | None) -> None:
        mx = self.server.mx
        try:
            logits = mx.zeros((1, rows or 1 << 20))
            for processor in self.server._make_logits_processors(asked):
                logits = processor(mx.array(prompt[-CONTEXT:]), logits)
        except Exception as error:
            raise ShimError(
                400, "invalid_value", f"the penalties or logit_bias cannot be used: {_what(error)}"
            ) from error


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {report.one_line(error)}"


def _check_prompt(prompt: Any, rows: int | None) -> None:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise ShimError(400, "invalid_value", "the prompt cannot be turned into a list of tokens")
    if not prompt:
        raise ShimError(
            400, "invalid_value", "the prompt is empty: it has no token; accepted: at least one"
        )
    if rows is not None and not 0 <= min(prompt) <= max(prompt) < rows:
        raise ShimError(
            400, "invalid_value", f"the prompt has the token {max(prompt)}; the model knows {rows}"
        )


def _check_ids(asked: Any, rows: int | None) -> None:
    if rows is None:
        return
    for token in asked.logits.logit_bias or {}:
        if not 0 <= token < rows:
            raise invalid(
                "logit_bias", f"logit_bias has the token id {token}; accepted: 0 to {rows - 1}"
            )
    if asked.top_logprobs > rows:
        raise invalid(
            "top_logprobs", f"top_logprobs is {asked.top_logprobs}; accepted: at most {rows}"
        )


def _check_sampling(sampling: Any, rows: int | None) -> None:
    """What stock's sampler refuses when it first runs, which is in the model's step."""
    if not sampling.temperature:
        return  # greedy: none of the rest is looked at
    if rows is not None and sampling.top_k >= rows:
        raise invalid(
            "top_k",
            f"top_k is {sampling.top_k}; accepted: 0 to {rows - 1}, the model's tokens less one",
        )
    if sampling.xtc_probability and sampling.xtc_threshold > 0.5:  # noqa: PLR2004
        raise invalid(
            "xtc_threshold", f"xtc_threshold is {sampling.xtc_threshold:g}; accepted: 0 to 0.5"
        )
