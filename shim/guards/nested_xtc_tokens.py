"""XTC sampling kills the generation thread (mlx-lm up to 0.31.3).

`_make_sampler` puts the tokens of a newline into the list of special tokens as a list, and an array
does not take a nested list as an index. Here the list is flat, as it has been since 0.32.
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import Incompatible, Retired, require
from ..probing import dry_run
from ..probing.dry_run import Anything

UPSTREAM = "no issue known; cured in release 0.32.0"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    """Look at the arguments with which stock's own function calls make_sampler."""
    require(server, "_make_sampler", "make_sampler")
    given: dict[str, Any] = {}
    make = dry_run.of(server._make_sampler, make_sampler=lambda *_, **named: given.update(named))
    make(Anything(), Anything(encode=lambda _: [1], eos_token_id=2, eos_token_ids={2}))
    if "xtc_special_tokens" not in given:
        raise Incompatible("_make_sampler gives make_sampler no xtc_special_tokens")
    if not any(isinstance(token, list) for token in given["xtc_special_tokens"]):
        raise Retired("the list is flat")


def apply(server: Any) -> None:
    patch.wrap(server, "make_sampler", _make_sampler)


def _make_sampler(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    tokens = kwargs.get("xtc_special_tokens")
    if tokens is not None:
        kwargs["xtc_special_tokens"] = [
            t for item in tokens for t in (item if isinstance(item, list) else [item])
        ]
    return wrapped(*args, **kwargs)
