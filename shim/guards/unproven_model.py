"""The server starts and says ok, and no request can ever succeed.

A draft model beside a hybrid model, --kv-bits beside a sliding window, a --temp of -1, a chat
template that does not parse, an adapter that does not exist (0.31.3 ignores it): each request
fails, and /health says ok. Here the server proves itself before it says ok: one short chat, with
the defaults of the command line, goes through the whole engine. If it fails, the process ends with
78, and one line names the option and the reason. So short a request does not reach everything: the
guard also quantizes its caches, and tries to trim one whose window is full. The chat also warms up
the kernels. MLX_SHIM_SELF_CHECK=0 turns the check off. There is none without a --model, nor
where several machines share a model.
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
# The second token is the first that the engine makes in decode.
TOKENS = 2
# Seconds until the request is in the engine's queue.
QUEUED_LIMIT = 10.0
# Seconds to try what is to be tried on its caches.
CACHES_LIMIT = 60.0
OK = 200
# Codes of refusals that say nothing about the command line.
_NO_VERDICT = (
    "draining",
    "shutting_down",
    "engine_dead",
    "engine_stalled",
    "memory_pressure",
    "context_length_exceeded",
    "breaker",
)
# Stock's names of the values that options set, as its refusals name them.
_NAMES = {
    "temperature": "--temp",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "max_tokens": "--max-tokens",
    "num_draft_tokens": "--num-draft-tokens",
}
# Words of an error, the attribute of the option that it is about, and the option.
_WORDS = (
    (r"speculative|draft|trimmable", "draft_model", "--draft-model"),
    (r"quantiz|group.size|\bbits\b", "kv_bits", "--kv-bits"),
)
# Options that change every request; None or empty where they were not given.
_OPTIONS = {
    "draft_model": "--draft-model",
    "kv_bits": "--kv-bits",
    "adapter_path": "--adapter-path",
    "chat_template": "--chat-template",
    "chat_template_args": "--chat-template-args",
}


class Failed(Exception):
    """The command line cannot work; the text names the option and the reason."""


def probe(server: Any) -> str:
    handler = answering.name_in(server)
    require(server, "ModelProvider.load_default", f"{handler}.do_POST")
    return ""


def apply(server: Any) -> None:
    patch.wrap(server, "ModelProvider.load_default", _Wrapper(server).load_default)
    if not own_request.install(server):
        report.debug(
            "the prompt cache keeps the caches of the self-check, which tries nothing on them"
        )


class _Wrapper:
    def __init__(self, server: Any) -> None:
        self._server = server

    def load_default(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Runs in the generation thread, before that takes up the request of a client."""
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
    """End the process if the folder does not exist: 0.31.3 ignores the option then."""
    adapter = getattr(anatomy.arguments_of(provider), "adapter_path", None)
    if adapter and not Path(adapter).exists():
        fatal.die(fatal.EX_CONFIG, f"--adapter-path {adapter}: this folder does not exist")


class _Check:
    """The self-check: a thread of its own asks, and the generation thread answers."""

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
        if _is_refused(chat):
            return
        if chat.status != OK:
            self._judge(chat)
            return
        if self._has_to_try_caches():
            if not self._own.filed.wait(CACHES_LIMIT):
                report.line("the self-check could not try the caches: the engine gave it none")
            if self._of_caches is not None:
                raise Failed(_blamed(self._arguments, _said(self._of_caches)))
        report.debug(f"the self-check took {time.monotonic() - self._begun:.3f} s")

    def _judge(self, chat: Answer) -> None:
        """Judge a chat that failed. If a text alone is answered, the template is at fault."""
        if chat.code == "generation_failed":
            raise Failed(_blamed(self._arguments, chat.message))
        alone = self._answer(OwnRequest(*TEXT_ALONE, TOKENS))
        if _is_refused(alone):
            return
        if alone.status != OK:
            raise Failed(_blamed(self._arguments, chat.message))
        if getattr(self._arguments, "chat_template", None):
            raise Failed(f"--chat-template: {chat.message}")
        if getattr(self._arguments, "chat_template_args", None):
            raise Failed(f"--chat-template-args: {chat.message}")
        if "TemplateSyntaxError" in chat.message:
            raise Failed(f"--model {engine.model_name}, its chat template: {chat.message}")
        report.line(f"a short chat fails, and a plain text is answered: {chat.message}")

    def _answer(self, own: OwnRequest) -> Answer:
        self._own = own
        answer = own.answer(self._server)
        report.debug(f"the self-check was answered {answer.status}: {answer.message}")
        return answer

    def _look(self) -> None:
        """Tell a stall of the self-check, for the watchdog.

        The guard stall may be off, and beside a draft model it does not judge.
        """
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
        """Runs in the generation thread, on caches that nothing else uses any more."""
        try:
            if getattr(self._arguments, "draft_model", None) is not None:
                _try_to_trim(self._server.mx, caches)
            if getattr(self._arguments, "kv_bits", None) is not None:
                self._try_to_quantize([*caches])
        except Exception as error:
            self._of_caches = error

    def _try_to_quantize(self, caches: list[Any]) -> None:
        """Quantize them as stock does from --quantized-kv-start on, and make a step with them."""
        mx, arguments = self._server.mx, self._arguments
        for n, cache in enumerate(caches):
            if hasattr(cache, "to_quantized"):
                caches[n] = cache.to_quantized(
                    group_size=arguments.kv_group_size, bits=arguments.kv_bits
                )
        if getattr(arguments, "draft_model", None) is None:
            mx.eval(self._provider.model(mx.array([[0]]), cache=caches))


def _is_refused(answer: Answer) -> bool:
    """Whether the answer proves nothing. A line says so, unless the process ends anyway."""
    if answer.code not in _NO_VERDICT:
        return False
    if not (engine.closing or fatal.begun()):
        report.line(f"the self-check was refused, and proves nothing: {answer.message}")
    return True


def _try_to_trim(mx: Any, caches: Any) -> None:
    """Fill a window of each size, and raise Failed if a full one cannot be trimmed.

    Beside a draft model stock trims after each wrong guess, and goes on if it cannot. Nothing is
    computed here: MLX is lazy.
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
    """Return an error with the option that it is about, or all options that may matter."""
    for name, option in _NAMES.items():
        if re.search(rf"\b{name}\b", what):
            return f"{option}: {what}"
    for words, name, option in _WORDS:
        value = getattr(arguments, name, None)
        if value is not None and re.search(words, what, re.IGNORECASE):
            group = getattr(arguments, "kv_group_size", "") if name == "kv_bits" else ""
            return f"{option} {value}{group and f' --kv-group-size {group}'}: {what}"
    given = [
        f"{option} {value}"
        for name, option in _OPTIONS.items()
        if (value := getattr(arguments, name, None)) not in (None, "", {})
    ]
    return f"{', '.join([f'--model {engine.model_name}', *given])}: {what}"
