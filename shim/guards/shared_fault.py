"""An exception in a step for one request ends the generation of all: the loop has no `try` there.

Such steps turn a token into text, format its top log-probabilities, take a cache out of the batch
and keep it. With sentencepiece one token of a padded vocabulary is enough (by logit_bias, or by
chance in sampling). Here only that request fails, with 500, and leaves the batch by stock's own
path; the others go on. A cache that cannot be counted is not kept, and its request keeps its
answer. Faults that may leave the batch unsound still end the server: RuntimeError and MemoryError,
which MLX raises when an evaluation fails, and any fault while a sequence is taken out of the batch.
So do all faults on several machines, whose ranks must agree.
"""

from __future__ import annotations

import sys
from typing import Any

from ..core import patch, report
from ..core.verdicts import Incompatible, require
from ..engine import facts
from ..engine.entries import Entry
from ..engine.state import engine
from ..models import insert_arguments

UPSTREAM = "mlx-lm 1909"
MODULE = "mlx_lm.server"
LIVES_BY = {"deliveries": facts.NEEDED, "batch": facts.NEEDED, "single": facts.NEEDED}

_UNSOUND = (RuntimeError, MemoryError)


def probe(server: Any) -> None:
    require(
        server,
        "BatchGenerator.insert_segments",
        "LRUPromptCache.insert_cache(model, tokens, prompt_cache)",
        "_format_top_logprobs",
    )
    generate = _home(server.BatchGenerator)
    require(
        generate,
        "PromptProcessingBatch.extract_cache(idx)",
        "GenerationBatch.extract_cache(idx)",
        "TokenizerWrapper.detokenizer",
    )
    require(_home(server.LRUPromptCache), "can_trim_prompt_cache")
    if not isinstance(vars(generate.TokenizerWrapper).get("detokenizer"), property):
        raise Incompatible("TokenizerWrapper.detokenizer is not a property")


def apply(server: Any) -> None:
    generate = _home(server.BatchGenerator)
    stock = generate.TokenizerWrapper.detokenizer
    generate.TokenizerWrapper.detokenizer = property(
        lambda tokenizer: _detokenizer(stock.fget, tokenizer), doc=stock.__doc__
    )
    patch.wrap(server, "_format_top_logprobs", _format_top_logprobs)
    patch.wrap(generate, "PromptProcessingBatch.extract_cache", _extract_cache)
    patch.wrap(generate, "GenerationBatch.extract_cache", _extract_cache)
    keeping = _Keeping(_home(server.LRUPromptCache).can_trim_prompt_cache)
    patch.wrap(server, "LRUPromptCache.insert_cache", keeping)


def _home(thing: Any) -> Any:
    """The module in which a class was defined."""
    return sys.modules[thing.__module__]


def _is_contained(entry: Entry | None, what: str, error: Exception) -> bool:
    """End that request alone, with `error`. False: the caller must raise the error.

    It must do so if the error belongs to no request, or may have left the batch unsound. `entry` is
    None for a request served alone: there stock contains the error by itself, and the client is
    told as well in which step it was raised.
    """
    error.__dict__.setdefault("_shim_where", what)
    if entry is None or isinstance(error, _UNSOUND) or engine.distributed:
        return False
    # Until stock takes the request out of the batch, it may fail again and again.
    if not entry.queue.closed:
        report.line_nowait(f"request {entry.id} failed alone, in {what}: {error!r}")
        entry.queue.close(error)
    return True


def _detokenizer(make: Any, tokenizer: Any) -> Any:
    """The detokenizer of the request that this thread has just put into the batch.

    A request served alone gets one as well; every other caller gets stock's own.
    """
    entry = engine.local.__dict__.pop("inserted", None)
    try:
        stock = make(tokenizer)
    except Exception as error:
        if not _is_contained(entry, "the detokenizer", error):
            raise
        return _Mute()
    return stock if entry is None and not engine.serving_alone else _Detokenizer(stock, entry)


class _Detokenizer:
    """A stock detokenizer, and the request it belongs to."""

    __slots__ = ("_entry", "_stock")

    def __init__(self, stock: Any, entry: Entry | None) -> None:
        self._stock = stock
        self._entry = entry

    def add_token(self, token: int) -> None:
        try:
            self._stock.add_token(token)
        except Exception as error:
            if not _is_contained(self._entry, "the detokenizer", error):
                raise

    def finalize(self) -> None:
        try:
            self._stock.finalize()
        except Exception as error:
            if not _is_contained(self._entry, "the detokenizer", error):
                raise

    @property
    def last_segment(self) -> str:
        engine.handling = self._entry
        try:
            segment: str = self._stock.last_segment
        except Exception as error:
            if not _is_contained(self._entry, "the detokenizer", error):
                raise
            return ""
        return segment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _Mute:
    """Stands for the detokenizer of a request that failed before it had one."""

    last_segment = ""

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass


def _format_top_logprobs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The loop calls this right after it has read the text of the same token."""
    entry, engine.handling = engine.handling, None
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        if not _is_contained(entry, "its top_logprobs", error):
            raise
        return ()


class _NoCache(list[Any]):
    """Stands for a cache that could not be taken out of the batch."""


def _extract_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        entry = _entry_at(instance, patch.given(wrapped, args, kwargs, "idx", 0))
        if not _is_contained(entry, "the extraction of its cache", error):
            raise
        return _NoCache()


def _entry_at(part: Any, index: int) -> Entry | None:
    """The request at `index` in a part of the server's batch; None in another batch."""
    batch = engine.batch()
    if batch is None or (part is not batch._prompt_batch and part is not batch._generation_batch):
        return None
    entries: dict[int, Entry] = batch.__dict__.get("_shim_entries", {})
    return entries.get(part.uids[index])


class _Keeping:
    """The wrapper of the prompt cache's insertion.

    It first makes the calls on the entry that stock makes while it changes the cache, so that an
    entry on which they fail does not get there.
    """

    def __init__(self, can_trim: Any) -> None:
        self.can_trim = can_trim

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        entry = insert_arguments.entry_of(args, kwargs)
        if isinstance(entry, _NoCache):
            return None
        if entry is not None and instance is engine.prompt_cache:
            try:
                sum(layer.nbytes for layer in entry)
                self.can_trim(entry)
            except Exception as error:
                if isinstance(error, _UNSOUND) or engine.distributed:
                    raise
                report.line_nowait(f"a cache cannot be counted and is not kept: {error!r}")
                return None
        return wrapped(*args, **kwargs)
