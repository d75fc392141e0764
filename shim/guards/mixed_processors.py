"""A batch of requests with and without penalties kills the generation thread (mlx-lm 0.31.3).

A logit bias counts as a penalty here. If no request of a batch has logits processors, `extend`
writes None for each request, and the next step iterates over it: "TypeError: 'NoneType' object is
not iterable". In such a batch `filter` also does not shorten the list: the processors of a request
that joins later are applied to no request, or to the wrong one. Here, after every change of the
batch, both lists (processors and samplers) have one item for each request, and no processors are
None.
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import Retired, require

UPSTREAM = "mlx-lm 1472, 1513"
MODULE = "mlx_lm.generate"


def probe(generate: Any) -> None:
    """Extend an empty batch by one request without processors. No model is run."""
    require(
        generate,
        "PromptProcessingBatch.empty",
        "PromptProcessingBatch.extend",
        "GenerationBatch.extend",
        "GenerationBatch.filter",
    )
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
        # The argument of `extend` is a batch, that of `filter` a list of positions.
        if hasattr(batch, "uids"):
            _complete(batch)
    result = wrapped(*args, **kwargs)
    _complete(instance)
    return result


def _complete(batch: Any) -> None:
    """Give both lists one item for each request."""
    requests = range(len(batch.uids))
    if any(batch.logits_processors or ()):
        batch.logits_processors = [processors or [] for processors in batch.logits_processors]
    else:
        batch.logits_processors = [[] for _ in requests]
    if not any(batch.samplers or ()):
        batch.samplers = [None for _ in requests]
