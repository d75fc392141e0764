"""The generation thread lives and delivers nothing: blocked in native code at 0 % CPU, or a livelock of its loop.

Here the stacks of all threads go to the log, clients are told, and the process ends with 70. Iterations prove nothing: the
loop of a livelock steps, and reports progress of other prompts. What counts is what was delivered to each request, and
when. Time alone cannot tell either: one step may prefill eight prompts of others for minutes before the next token of
those in decode. The rules are in `_judge`.
"""

from __future__ import annotations

import faulthandler
from typing import Any

from ..core import errors, report, settings
from ..core.verdicts import Incompatible
from ..engine import anatomy, crash_report, facts, fatal, trial, watchdog
from ..engine.entries import DECODE, FINISHED, PREFILL, Entry
from ..engine.state import Engine, engine

UPSTREAM = "mlx-lm 1493, 1505, 1598, 1672, 1834"
MODULE = "mlx_lm.server"
SETTINGS = ("decode_stall", "prefill_stall")
LIVES_BY = {
    ("deliveries", "answers"): facts.NEEDED,
    "deliveries": "only silence towards everybody is told, after MLX_SHIM_PREFILL_STALL",
    "steps": "a request that gets nothing beside others is told after 20 deliveries to those",
    "batch": "a request whose client has left counts only while nothing is delivered to anybody",
    "loads": "a load that takes longer than MLX_SHIM_PREFILL_STALL is taken for a stall",
    "tokenizing": "a text that takes longer than MLX_SHIM_DECODE_STALL to tokenize is taken for a stall of others",
}

# Steps of the batch completed since a request's last token that prove it was starved: its own may have been the last
# thing but one to be handed out.
STEPS = 2
# Where steps cannot be seen (a BatchGenerator of another make): deliveries to others that prove as much.
OTHERS = 20
# Seconds a verdict must hold: the watchdog may look while a step's deliveries are being handed out, one after another.
CONFIRM = 1.0

_suspects: dict[int, float] = {}
_paused = 0.0
_stalled_at = 0  # the count of deliveries then


def probe(server: Any) -> None:
    """Have a copy of stock's generator deliver a token and then nothing: that is a stall once the limit is over."""
    tried = trial.in_decode(server)
    if tried is not None:
        entry, its_engine = tried
        its_engine.clock += (settings.current.decode_stall or settings.current.prefill_stall) + 1
        if _judge(entry, [entry], its_engine) is None:
            raise Incompatible(
                "in a trial a request that got a token and then nothing was not seen"
            )


def apply(server: Any) -> None:
    watchdog.add(_check)


def _check() -> None:
    """Called by the watchdog. The engine's clock rests while nothing can be delivered, so no case here is about that."""
    now = engine.clock
    if not facts.has("deliveries"):
        _check_answers(now)
        return
    if not facts.has("batch"):
        _let_go_of_others(now)
    # A request whose client has left counts until the engine lets go of it: it may be what the engine is stuck in.
    entries = [
        entry for entry in engine.known() if entry.queue is not None and entry.phase != FINISHED
    ]
    _note_pause(entries, now)
    verdicts = {
        entry.id: (entry, why) for entry in entries if (why := _judge(entry, entries, engine))
    }
    for number in [n for n in _suspects if n not in verdicts]:
        del _suspects[number]
    for number, (entry, why) in verdicts.items():
        if now - _suspects.setdefault(number, now) >= CONFIRM:
            _stalled_request(entry, why)
            return
    if engine.stalled is not None and not verdicts and engine.deliveries > _stalled_at:
        report.line("deliveries have resumed")
        engine.stalled = None


def _let_go_of_others(now: float) -> None:
    """Where stock's removals cannot be seen: an engine that delivers to others is not stuck in one whose client has left."""
    for entry in list(engine.abandoned.values()):
        if engine.delivered > entry.last and now - entry.last > CONFIRM:
            engine.let_go(entry)


def _note_pause(entries: list[Entry], now: float) -> None:
    """With the batch full of requests in decode, stock prefills nobody: that is waiting, not stalling."""
    global _paused
    arguments = engine.arguments
    width = max(
        getattr(arguments, "decode_concurrency", 32), getattr(arguments, "prompt_concurrency", 8)
    )
    if sum(entry.phase == DECODE for entry in entries) >= width:
        _paused = now


def _judge(entry: Entry, entries: list[Entry], engine: Engine) -> str | None:
    """Why this request is stalled, in words, or None. Seconds are of the engine's clock; a limit of 0 is none."""
    decode, prefill = settings.current.decode_stall, settings.current.prefill_stall
    now = engine.clock
    silence = now - entry.last
    if entry.phase == DECODE:
        excused = engine.tokenizing or any(e.phase == PREFILL for e in entries)
        others, steps = engine.deliveries - entry.mark, engine.steps - entry.step
        starved = steps >= STEPS if engine.steps else others >= OTHERS
        if decode and silence >= decode and (starved or not excused):
            return f"no token for {silence:.0f} s while {others} deliveries went to others"
        if prefill and silence >= prefill:
            return f"no token for {silence:.0f} s"
    elif not prefill or _drafting():
        return None
    elif entry.phase == PREFILL and entry.progressed:
        if now - max(entry.last, _paused) >= prefill:
            return f"no progress in its prompt for {silence:.0f} s"
    elif now - max(entry.last, engine.delivered) >= prefill:
        # It waits for its turn, in the server's queue or in the batch: only silence towards everybody counts.
        return f"nothing delivered to anyone for {now - max(entry.last, engine.delivered):.0f} s while it waits"
    return None


def _drafting() -> bool:
    """Whether somebody is served alone beside a draft model: stock reports no progress of such a prompt."""
    return engine.serving_alone and getattr(engine.provider, "draft_model", None) is not None


class _Standing:
    """Where the generation thread is, and since when: looked at only where nothing better can be seen.

    The frame is held, so that no later one can be taken for it.
    """

    frame: Any = None
    instruction = 0
    since = 0.0


def _check_answers(now: float) -> None:
    """Where deliveries cannot be seen: no answer has got a byte, and the generation thread has stood in one place.

    An answer that is not streamed has no bytes until it is whole, so that their absence alone proves nothing.
    """
    limit = settings.current.prefill_stall
    frame = anatomy.frame_of(engine.generation_thread)
    if frame is None or frame is not _Standing.frame or frame.f_lasti != _Standing.instruction:
        _Standing.frame, _Standing.since = frame, now
        _Standing.instruction = frame.f_lasti if frame is not None else 0
    waiting = [
        answer
        for answer in list(engine.answers.values())
        if answer is not None and not answer.writing
    ]
    silent = bool(waiting) and all(now - answer.silent_since >= limit for answer in waiting)
    if limit and silent and now - _Standing.since >= limit:
        _stalled(
            "answers",
            f"no byte of {len(waiting)} answers and no move of the generation thread for {limit:.0f} s",
        )
    elif engine.stalled is not None and not silent:
        report.line("answers have resumed")
        engine.stalled = None


def _stalled_request(entry: Entry, why: str) -> None:
    _stalled(f"request {entry.id} ({entry.phase}, {entry.tokens} tokens)", why)


def _stalled(who: str, why: str) -> None:
    global _stalled_at
    if engine.stalled is not None:
        return  # this episode has been reported
    thread = engine.generation_thread
    frames = crash_report.stack(thread.ident if thread else None)
    where = " < ".join(reversed(frames[-3:])) or "unknown"
    verdict = f"stalled: {who}: {why}; the generation thread is in {where}"
    if engine.proving is not None:
        why = engine.proving(verdict)
        fatal.die(fatal.EX_CONFIG, why, _dump, tell=errors.engine_stalled())
    if settings.current.on_stall == "dump":
        _stalled_at = engine.deliveries
        engine.stalled = verdict
        report.line(verdict)
        _dump()
    else:
        fatal.die(fatal.EX_SOFTWARE, verdict, _dump, tell=errors.engine_stalled())


def _dump() -> None:
    """The stacks of all threads, to stderr."""
    fd = report.stderr_fd()
    if fd is not None:
        faulthandler.dump_traceback(fd, all_threads=True)
