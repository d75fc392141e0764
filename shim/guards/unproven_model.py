"""The server starts, says that it is well, and no request can ever succeed.

A draft model beside a hybrid one, --kv-bits beside a sliding window, a --temp of -1, a chat
template that does not parse, an adapter that is not there (0.31.3 ignores it): each request fails,
and /health says ok. Here the server proves itself before it says so: one short chat, with the
defaults of the command line, goes through the whole engine. Where it fails the process ends with
78, and one line names the option and the reason. So short a request does not reach everything: to
quantize a cache, and to trim one whose window is full, is tried on its caches. The chat also warms
up the kernels. MLX_SHIM_SELF_CHECK=0 switches this off. Without a --model it is not done, nor where
several machines share a model.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

from ..core import patch, report, settings
from ..core.verdicts import require
from ..engine import anatomy, answering, facts, fatal, own_request, watchdog
from ..engine.own_request import Answer, OwnRequest
from ..engine.state import engine

UPSTREAM = "mlx-lm 1446, 1573, 1804, 1353, 1248"
MODULE = "mlx_lm.server"
SETTINGS = ("self_check",)
LIVES_BY = {
    "boot": facts.NEEDED,
    "deliveries": "its request may ask for as many tokens as --max-tokens says",
}

TEXT = "Say one word. (self-check of mlx-lm-shim)"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]})
TEXT_ALONE = ("/v1/completions", {"prompt": TEXT})
TOKENS = 2  # the second one is the first that the engine makes in decode
QUEUED_LIMIT = 10.0  # seconds until the request is in the engine's queue
CACHES_LIMIT = 60.0  # seconds for what is tried on its caches
OK = 200
# Refusals that tell nothing of the command line.
_NO_VERDICT = (
    "draining", "shutting_down", "engine_dead", "engine_stalled", "memory_pressure",
    "context_length_exceeded", "breaker",
)  # fmt: skip
# What stock calls the values of the command line's options where it refuses one.
_NAMES = {
    "temperature": "--temp", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p",
    "max_tokens": "--max-tokens", "num_draft_tokens": "--num-draft-tokens",
}  # fmt: skip
# Words of an error, the attribute of the option that it is about, and the option.
_WORDS = (
    (r"speculative|draft|trimmable", "draft_model", "--draft-model"),
    (r"quantiz|group.size|\bbits\b", "kv_bits", "--kv-bits"),
)
# Options that change every request; None or empty where they were not given.
_OPTIONS = {
    "draft_model": "--draft-model", "kv_bits": "--kv-bits", "adapter_path": "--adapter-path",
    "chat_template": "--chat-template", "chat_template_args": "--chat-template-args",
}  # fmt: skip


class Failed(Exception):
    """What cannot work: the option, and why."""


def probe(server: Any) -> str:
    handler = answering.name_in(server)
    require(server, "ModelProvider.load_default", f"{handler}.do_POST")
    return ""


def apply(server: Any) -> None:
    patch.wrap(server, "ModelProvider.load_default", _Wrapper(server).load_default)
    if not own_request.install(server):
        report.debug("the caches of the self-check are kept, and nothing is tried on them")


class _Wrapper:
    def __init__(self, server: Any) -> None:
        self._server = server

    def load_default(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """In the generation thread: the model proves itself before a client's request is taken up."""
        asked_for = False
        with report.contained("the self-check cannot be made"):
            asked_for = _is_asked_for(instance)
            if asked_for:
                _look_for_adapter(instance)
        result = wrapped(*args, **kwargs)
        if asked_for and not engine.closing:
            with report.contained("the self-check cannot be made"):
                _Check(self._server, instance).begin()
        return result


def _is_asked_for(provider: Any) -> bool:
    arguments = anatomy.arguments_of(provider)
    named = getattr(arguments, "model", None) is not None
    generator = engine.generator
    serves = anatomy.is_stock(generator) and provider is engine.provider
    return named and serves and not engine.distributed


def _look_for_adapter(provider: Any) -> None:
    """Stock's 0.31.3 ignores the option, a folder that is not there included."""
    adapter = getattr(anatomy.arguments_of(provider), "adapter_path", None)
    if adapter and not Path(adapter).exists():
        fatal.die(fatal.EX_CONFIG, f"--adapter-path {adapter}: there is no such folder")


class _Check:
    """The self-check: a thread asks, and the generation thread answers."""

    def __init__(self, server: Any, provider: Any) -> None:
        self._server = server
        self._provider = provider
        self._arguments = anatomy.arguments_of(provider)
        self._begun = time.monotonic()
        self._own: OwnRequest | None = None
        self._of_caches: Exception | None = None

    def begin(self) -> None:
        """Ask, and wait until the request is the first in the engine's queue."""
        engine.proving = self._words
        watchdog.add(self._look)
        self._own = OwnRequest(*CHAT, TOKENS, self._try_caches)
        try:
            threading.Thread(target=self._run, name="mlx-shim-self-check", daemon=True).start()
        except Exception:
            engine.proving = None
            raise
        if facts.has("deliveries"):
            self._own.asked.wait(QUEUED_LIMIT)

    def _words(self, what: str) -> str:
        return f"the self-check failed: {_blamed(self._arguments, what)}"

    def _run(self) -> None:
        try:
            self._prove()
        except Failed as failed:
            if not engine.closing:
                fatal.die(fatal.EX_CONFIG, f"the self-check failed: {failed}")
        except Exception as error:
            report.line(f"the self-check could not be made: {report.one_line(repr(error))}")
        finally:
            engine.proving = None
            if self._own is not None:
                self._own.asked.set()

    def _prove(self) -> None:
        assert self._own is not None  # noqa: S101 - begin has made it
        chat = self._answer(self._own)
        if chat.code in _NO_VERDICT:
            report.line(f"the self-check was refused, and tells nothing: {chat.message}")
            return
        if chat.status != OK:
            self._judge(chat)
            return
        if self._has_to_try_caches():
            if not self._own.filed.wait(CACHES_LIMIT):
                report.line("the self-check could not try the caches: it was given none")
            if self._of_caches is not None:
                raise Failed(_blamed(self._arguments, _said(self._of_caches)))
        report.debug(f"the self-check took {time.monotonic() - self._begun:.3f} s")

    def _judge(self, chat: Answer) -> None:
        """A chat failed. Where a text alone is answered, it is the template's fault."""
        if chat.code == "generation_failed":
            raise Failed(_blamed(self._arguments, chat.message))
        alone = self._answer(OwnRequest(*TEXT_ALONE, TOKENS))
        if alone.code in _NO_VERDICT:
            report.line(f"the self-check was refused, and tells nothing: {alone.message}")
        elif alone.status != OK:
            raise Failed(_blamed(self._arguments, chat.message))
        elif getattr(self._arguments, "chat_template", None):
            raise Failed(f"--chat-template: {chat.message}")
        elif getattr(self._arguments, "chat_template_args", None):
            raise Failed(f"--chat-template-args: {chat.message}")
        elif "TemplateSyntaxError" in chat.message:
            raise Failed(f"--model {engine.model_name}, its chat template: {chat.message}")
        else:
            report.line(f"a short chat fails, a text alone is answered: {chat.message}")

    def _answer(self, own: OwnRequest) -> Answer:
        self._own = own
        answer = own.answer(self._server)
        report.debug(f"the self-check was answered {answer.status} {answer.message}".rstrip())
        return answer

    def _look(self) -> None:
        """Called by the watchdog. stall may be off, and beside a draft model it does not judge."""
        entry = self._own.entry if self._own is not None else None
        limit = settings.current.prefill_stall
        if engine.proving is None or entry is None or not limit or engine.closing:
            return
        silence = engine.clock - entry.last
        if silence >= limit:
            fatal.die(fatal.EX_CONFIG, self._words(f"no token for {silence:.0f} s"))

    def _has_to_try_caches(self) -> bool:
        given = (getattr(self._arguments, name, None) for name in ("kv_bits", "draft_model"))
        return any(value is not None for value in given)

    def _try_caches(self, caches: Any) -> None:
        """In the generation thread, with the caches of the request, which are kept by nobody."""
        try:
            if getattr(self._arguments, "draft_model", None) is not None:
                _try_to_trim(self._server.mx, caches)
            if getattr(self._arguments, "kv_bits", None) is not None:
                self._try_to_quantize([*caches])
        except Exception as error:
            self._of_caches = error

    def _try_to_quantize(self, caches: list[Any]) -> None:
        """As stock does from --quantized-kv-start on; then one step of the model with the result."""
        mx, arguments = self._server.mx, self._arguments
        for n, cache in enumerate(caches):
            if hasattr(cache, "to_quantized"):
                caches[n] = cache.to_quantized(
                    group_size=arguments.kv_group_size, bits=arguments.kv_bits
                )
        if getattr(arguments, "draft_model", None) is None:
            mx.eval(self._provider.model(mx.array([[0]]), cache=caches))


def _try_to_trim(mx: Any, caches: Any) -> None:
    """Beside a draft model stock trims after each wrong guess, and goes on where it cannot.

    A window of each size is filled, and asked. Nothing is computed: MLX is lazy.
    """
    asked = set()
    for cache in caches:
        kind, size = type(cache), getattr(cache, "max_size", None)
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if not isinstance(size, int) or keys is None or values is None or (kind, size) in asked:
            continue
        asked.add((kind, size))
        more = [mx.zeros((*a.shape[:2], size + 1, a.shape[3]), a.dtype) for a in (keys, values)]
        cache.update_and_fetch(*more)
        if not cache.is_trimmable():
            raise Failed(
                f"a draft model needs a trimmable cache, and from {size} tokens on "
                f"{kind.__name__} is not one"
            )


def _said(error: Exception) -> str:
    if isinstance(error, Failed):
        return str(error)
    return f"{type(error).__name__}: {report.one_line(error)}"


def _blamed(arguments: Any, what: str) -> str:
    """The option of the command line that an error is about, as far as it tells, and the error."""
    for name, option in _NAMES.items():
        if re.search(rf"\b{name}\b", what):
            return f"{option}: {what}"
    for words, name, option in _WORDS:
        value = getattr(arguments, name, None)
        if value is not None and re.search(words, what, re.IGNORECASE):
            group = getattr(arguments, "kv_group_size", "") if name == "kv_bits" else ""
            return f"{option} {value}{group and f' --kv-group-size {group}'}: {what}"
    given = [
        f"{option} {value}" for name, option in _OPTIONS.items()
        if (value := getattr(arguments, name, None)) not in (None, "", {})
    ]  # fmt: skip
    return f"{', '.join([f'--model {engine.model_name}', *given])}: {what}"
