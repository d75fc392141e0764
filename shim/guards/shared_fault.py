"""A fault in what concerns one request ends the generation of all: the loop does it outside any try.

Turning a token into text, its top log-probabilities, taking a cache out of the batch and keeping it: an exception there
kills the thread. A token of a padded vocabulary is enough where the tokenizer is sentencepiece's (logit_bias, or bad
luck in sampling). Here that request fails with 500 and leaves the batch by stock's own path; the others go on. A cache
that cannot be counted is not kept, and its request keeps its answer. What may leave the batch unsound stays a death:
RuntimeError and MemoryError, which MLX raises for an evaluation that failed, and whatever fails in taking a sequence
out of the batch. So does everything on several machines, whose ranks must agree.
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
        server, "BatchGenerator.insert_segments", "LRUPromptCache.insert_cache(model, tokens, prompt_cache)",
        "_format_top_logprobs",
    )  # fmt: skip
    generate = _home(server.BatchGenerator)
    require(
        generate, "PromptProcessingBatch.extract_cache(idx)", "GenerationBatch.extract_cache(idx)",
        "TokenizerWrapper.detokenizer",
    )  # fmt: skip
    require(_home(server.LRUPromptCache), "can_trim_prompt_cache")
    if not isinstance(vars(generate.TokenizerWrapper).get("detokenizer"), property):
        raise Incompatible("TokenizerWrapper.detokenizer is no property")


def apply(server: Any) -> None:
    generate = _home(server.BatchGenerator)
    stock = generate.TokenizerWrapper.detokenizer
    generate.TokenizerWrapper.detokenizer = property(
        lambda tokenizer: _detokenizer(stock.fget, tokenizer), doc=stock.__doc__
    )
    patch.wrap(server, "_format_top_logprobs", _format_top_logprobs)
    patch.wrap(generate, "PromptProcessingBatch.extract_cache", _extract_cache)
    patch.wrap(generate, "GenerationBatch.extract_cache", _extract_cache)
    patch.wrap(
        server,
        "LRUPromptCache.insert_cache",
        _Keeping(_home(server.LRUPromptCache).can_trim_prompt_cache),
    )


def _home(thing: Any) -> Any:
    """The module a class was defined in."""
    return sys.modules[thing.__module__]


def _is_contained(entry: Entry | None, what: str, error: Exception) -> bool:
    """End that request alone, with `error`. False where it must be raised on: nobody's, or not sure to be sound.

    Alone in the loop (no entry is given then) stock contains it by itself, and the client is told what failed as well.
    """
    error.__dict__.setdefault("_shim_where", what)
    if entry is None or isinstance(error, _UNSOUND) or engine.distributed:
        return False
    if not entry.queue.closed:  # until stock takes it out of the batch, it may fail again and again
        report.line_nowait(f"request {entry.id} failed alone, in {what}: {error!r}")
        entry.queue.close(error)
    return True


def _detokenizer(make: Any, tokenizer: Any) -> Any:
    """In the generation thread, that of the request which it has just put into the batch. Others get stock's own."""
    entry = engine.local.__dict__.pop("inserted", None)
    try:
        stock = make(tokenizer)
    except Exception as error:
        if not _is_contained(entry, "the detokenizer", error):
            raise
        return _Mute()
    return stock if entry is None and not engine.serving_alone else _Detokenizer(stock, entry)


class _Detokenizer:
    """A stock detokenizer, and whose it is."""

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
    """For a request that has failed before it had a detokenizer."""

    last_segment = ""

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass


def _format_top_logprobs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The loop asks for it right after the text of the same token."""
    entry, engine.handling = engine.handling, None
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        if not _is_contained(entry, "its top_logprobs", error):
            raise
        return ()


class _Nothing(list[Any]):
    """Stands for a cache that could not be taken out of the batch."""


def _extract_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        entry = _entry_at(instance, args[0] if args else kwargs["idx"])
        if not _is_contained(entry, "the extraction of its cache", error):
            raise
        return _Nothing()


def _entry_at(part: Any, index: int) -> Entry | None:
    """Whose sequence is at `index` in a part of the server's batch; None in a batch of somebody else."""
    batch = engine.batch()
    if batch is None or (part is not batch._prompt_batch and part is not batch._generation_batch):
        return None
    entries: dict[int, Entry] = batch.__dict__.get("_shim_entries", {})
    return entries.get(part.uids[index])


class _Keeping:
    """Around the prompt cache's insertion: asks first what stock asks before, and after, it has begun to change."""

    def __init__(self, can_trim: Any) -> None:
        self.can_trim = can_trim

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        entry = insert_arguments.entry_of(args, kwargs)
        if isinstance(entry, _Nothing):
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
