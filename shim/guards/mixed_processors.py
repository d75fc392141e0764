"""A batch that mixes requests with and without penalties or a logit bias kills the generation thread (mlx-lm 0.31.3).

Where no request of a batch has logits processors, `extend` writes None for each, and the next step iterates over it:
"TypeError: 'NoneType' object is not iterable". And where none has any, `filter` leaves the list as long as it was, so
that the processors of a request that joins later are applied to nobody, or to somebody else. Here both lists, of
processors and of samplers, have one item a request whenever the batch has changed, and no None among the processors.
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import Retired, require

UPSTREAM = "mlx-lm 1472, 1513"
MODULE = "mlx_lm.generate"


def probe(generate: Any) -> None:
    """Extend an empty batch by one request without processors. No model is asked."""
    require(
        generate, "PromptProcessingBatch.empty", "PromptProcessingBatch.extend", "GenerationBatch.extend",
        "GenerationBatch.filter",
    )  # fmt: skip
    batch = generate.PromptProcessingBatch.empty(None, None)
    batch.extend(
        generate.PromptProcessingBatch(
            None, [0], [[]], tokens=[[1]], samplers=[None], logits_processors=[[]]
        )
    )
    if None not in batch.logits_processors:
        raise Retired(f"a request without logits processors has {batch.logits_processors}")


def apply(generate: Any) -> None:
    for name in (
        "PromptProcessingBatch.extend",
        "GenerationBatch.extend",
        "GenerationBatch.filter",
    ):
        patch.wrap(generate, name, _change)


def _change(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    for batch in (instance, *args, *kwargs.values()):
        if hasattr(batch, "uids"):  # what `filter` is given is a list of places
            _complete(batch)
    result = wrapped(*args, **kwargs)
    _complete(instance)
    return result


def _complete(batch: Any) -> None:
    """One item for each request in both lists."""
    requests = range(len(batch.uids))
    if any(batch.logits_processors or ()):
        batch.logits_processors = [processors or [] for processors in batch.logits_processors]
    else:
        batch.logits_processors = [[] for _ in requests]
    if not any(batch.samplers or ()):
        batch.samplers = [None for _ in requests]
