"""The generation thread lives but delivers nothing: it is blocked, or its loop is in a livelock.

A thread blocked in native code is at 0 % CPU. Here the shim writes the stacks of all threads to the
log, tells the clients, and ends the process with 70. It does not count iterations: a loop in a
livelock still steps, and reports progress of other prompts. It looks at what was delivered to each
request, and when. Time alone is not enough either: one step may prefill eight other prompts for
minutes before the requests in decode get their next token. The rules are in `_judge`.
"""

from __future__ import annotations

import faulthandler
import tempfile
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
    "deliveries": "a stall is seen only if no client gets anything for MLX_SHIM_PREFILL_STALL",
    "steps": "a request that gets nothing is seen to stall only after 20 deliveries to others",
    "batch": "a request whose client has left counts only while nothing is delivered to anybody",
    "loads": "a load that takes longer than MLX_SHIM_PREFILL_STALL is taken for a stall",
    "tokenizing": (
        "a text that takes longer than MLX_SHIM_DECODE_STALL to tokenize is taken for a stall "
        "of others"
    ),
}

# So many steps of the batch since a request's last token prove that it was starved. One would not:
# the tokens of that step may still be being handed out.
STARVED_STEPS = 2
# Where steps cannot be seen (another BatchGenerator than stock's), so many deliveries to others
# prove the same.
STARVED_DELIVERIES = 20
# A verdict must hold for so long: the watchdog may look in the middle of a step's deliveries.
CONFIRM_SECONDS = 1.0
# Seconds for the log to be written, before the stacks are written past it.
LOG_LIMIT = 0.2

# By the number of a request: since when it counts as stalled, by the engine's clock.
_suspects: dict[int, float] = {}
# When the batch was last full of requests in decode, by the engine's clock.
_paused = 0.0
# The count of deliveries when a stall was reported.
_stalled_at = 0


def probe(server: Any) -> None:
    """A copy of stock's generator delivers one token: `_judge` must see a stall after the limit."""
    tried = trial.try_decode(server)
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
    """Called by the watchdog. The engine's clock rests while nothing can be delivered."""
    now = engine.clock
    if not facts.has("deliveries"):
        _check_answers(now)
        return
    if not facts.has("batch"):
        _let_go_of_others(now)
    # A request whose client has left counts until the engine lets go of it: the engine may be stuck
    # in it.
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
        if now - _suspects.setdefault(number, now) >= CONFIRM_SECONDS:
            _stalled_request(entry, why)
            return
    if engine.stalled is not None and not verdicts and engine.deliveries > _stalled_at:
        report.line("deliveries have resumed")
        engine.stalled = None


def _let_go_of_others(now: float) -> None:
    """Forget requests whose client has left, if the engine has delivered to others since.

    Used where stock's removals from the batch cannot be seen: such an engine is not stuck in them.
    """
    for entry in list(engine.abandoned.values()):
        if engine.delivered > entry.last and now - entry.last > CONFIRM_SECONDS:
            engine.let_go(entry)


def _note_pause(entries: list[Entry], now: float) -> None:
    """Note a batch that is full of requests in decode: stock then starts no prompt, but waits."""
    global _paused
    arguments = engine.arguments
    width = max(
        getattr(arguments, "decode_concurrency", 32), getattr(arguments, "prompt_concurrency", 8)
    )
    if sum(entry.phase == DECODE for entry in entries) >= width:
        _paused = now


def _judge(entry: Entry, entries: list[Entry], engine: Engine) -> str | None:
    """Why this request is stalled, in words, or None.

    Seconds are of the engine's clock; a limit of 0 means that there is none.
    """
    decode, prefill = settings.current.decode_stall, settings.current.prefill_stall
    now = engine.clock
    silence = now - entry.last
    if entry.phase == DECODE:
        excused = engine.tokenizing or any(e.phase == PREFILL for e in entries)
        others, steps = engine.deliveries - entry.mark, engine.steps - entry.step
        starved = steps >= STARVED_STEPS if engine.steps else others >= STARVED_DELIVERIES
        if decode and silence >= decode and (starved or not excused):
            return f"no token for {silence:.0f} s while {others} deliveries went to others"
        if prefill and silence >= prefill:
            return f"no token for {silence:.0f} s"
    elif not prefill or _drafting():
        return None
    elif entry.phase == PREFILL and entry.progressed:
        if now - max(entry.last, _paused) >= prefill:
            return f"no progress in its prompt for {silence:.0f} s"
    elif (nothing := now - max(entry.last, engine.delivered)) >= prefill:
        # It waits for its turn, in the server's queue or in the batch: it is stalled only if no
        # other request gets anything either.
        return f"nothing delivered to anyone for {nothing:.0f} s while it waits"
    return None


def _drafting() -> bool:
    """Whether a request is served alone with a draft model: its prompt reports no progress."""
    return engine.serving_alone and getattr(engine.provider, "draft_model", None) is not None


class _Standing:
    """Where the generation thread is, and since when; used only where deliveries cannot be seen.

    It keeps the frame, so that no later frame can have the same identity.
    """

    frame: Any = None
    instruction = 0
    since = 0.0


def _check_answers(now: float) -> None:
    """Look for a stall where deliveries cannot be seen.

    It is one if no answer has got a byte, and the generation thread has not moved. The bytes alone
    prove nothing: an answer that is not streamed has none until it is complete.
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
            f"no byte of {len(waiting)} answers and no move of the generation thread "
            f"for {limit:.0f} s",
        )
    elif engine.stalled is not None and not silent:
        report.line("answers have resumed")
        engine.stalled = None


def _stalled_request(entry: Entry, why: str) -> None:
    _stalled(f"request {entry.id} ({entry.phase}, {entry.tokens} tokens)", why)


def _stalled(who: str, why: str) -> None:
    global _stalled_at
    if engine.stalled is not None:
        # This stall has been reported.
        return
    thread = engine.generation_thread
    frames = crash_report.stack(thread.ident if thread else None)
    where = " < ".join(reversed(frames[-3:])) or "unknown"
    verdict = f"stalled: {who}: {why}; the generation thread is in {where}"
    # A stall in the self-check is a failed start.
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
    """Write the stacks of all threads to stderr."""
    fd = report.stderr_fd()
    if fd is None:
        return
    if report.log is None:
        faulthandler.dump_traceback(fd, all_threads=True)
        return
    # faulthandler would wait for a reader of stderr. It writes to a file, which needs none, and the
    # thread of the log passes that on.
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            report.log.put(file.read())
    except OSError as error:
        report.line(f"there is no room for a file of the stacks: {error}")
        if report.flush(LOG_LIMIT):
            faulthandler.dump_traceback(fd, all_threads=True)
