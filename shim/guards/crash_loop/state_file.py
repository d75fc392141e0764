"""The state file of one server: how its last runs ended, for the start that follows a death.

It is JSON, in a file of its own for each host, port and model, named by their hash. Beside it is
a lock, which the living server holds and the system takes from a dead one. The functions raise
OSError, or what they say. `Keeper` calls them in a thread of its own, so that a file system that
hangs stops only that thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .backoff import Death

WAITING, LOADING, UP = "waiting", "loading", "up"
LARGEST_FILE = 65536  # bytes
# Numbers in a file are smaller: seconds since 1970, and bytes.
_LARGEST_NUMBER = 1e15
# Not blocking: opening a pipe would wait for its other end.
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

T = TypeVar("T")


class Corrupt(Exception):
    """The file is not a state file; the message says why."""


class Held(Exception):
    """Another process serves the same model at the same host and port."""


@dataclass(frozen=True)
class Run:
    """A run whose end is not noted.

    `seen` is when it last noted that it lives, `until` when its wait is over.
    """

    phase: str
    seen: float
    until: float = 0.0


@dataclass(frozen=True)
class State:
    """What is remembered of a server. Times are of the wall clock, sizes in bytes."""

    deaths: list[Death] = field(default_factory=list)
    # Whether a start has waited for these deaths.
    served: bool = False
    # Whether the last run that loaded a model ended without noting it.
    killed: bool = False
    # The footprint when the model had just been loaded.
    model: int = 0
    # The footprint when it was last noted.
    footprint: int = 0
    run: Run | None = None

    def encode(self) -> bytes:
        run = self.run and [self.run.phase, self.run.seen, self.run.until]
        return json.dumps({**self.__dict__, "run": run}).encode()


def decode(text: bytes) -> State:
    """The state in `text`. Raises Corrupt."""
    try:
        known = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not JSON ({type(error).__name__})") from None
    if not isinstance(known, dict):
        raise Corrupt("not a JSON object")
    try:
        deaths = [
            Death(_number(at), None if s is None else int(_number(s))) for at, s in known["deaths"]
        ]
        run = known["run"] and _run(known["run"])
        sizes = int(_number(known["model"])), int(_number(known["footprint"]))
        return State(deaths, known["served"] is True, known["killed"] is True, *sizes, run or None)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Corrupt(f"not as the shim writes it ({error!r:.60})") from None


def _run(noted: Any) -> Run:
    return Run(_phase(noted[0]), _number(noted[1]), _number(noted[2]))


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -_LARGEST_NUMBER < value < _LARGEST_NUMBER:
        # NaN comes here too.
        raise TypeError("a number is wanted")
    return float(value)


def _phase(value: Any) -> str:
    if value not in (WAITING, LOADING, UP):
        raise TypeError("a phase is wanted")
    return str(value)


def folder(setting: str) -> Path:
    """The folder of the state files: `setting`, or the user's usual place for such files.

    Raises RuntimeError where the user has no home.
    """
    if setting:
        return Path(setting).expanduser()
    if sys.platform == "darwin":
        return _home() / "Library" / "Application Support" / "mlx-lm-shim"
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else _home() / ".local" / "state") / "mlx-lm-shim"


def _home() -> Path:
    home = Path.home()
    # An empty HOME is / to Python.
    if not home.is_absolute() or home == home.parent:
        raise RuntimeError("the user has no home folder")
    return home


def key(*named: object) -> str:
    """The name of the file for these arguments of the command line: a hash, which hides them."""
    return hashlib.sha256(json.dumps(named, default=str).encode()).hexdigest()[:32]


class StateFile:
    """One file. Its lock is held as long as the process lives."""

    def __init__(self, where: Path, name: str) -> None:
        """Make the folder, for its owner only, and take the lock. Raises Held and OSError."""
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = where / f"{name}.json"
        self._scratch = where / f"{name}.new"
        self._lock = os.open(where / f"{name}.lock", os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Held from None
        except OSError:
            os.close(self._lock)
            raise

    def read(self) -> State:
        """The state, a fresh one where there is no file. Raises Corrupt and OSError."""
        try:
            opened = os.open(self.path, os.O_RDONLY | _OPEN)
        except FileNotFoundError:
            return State()
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise Corrupt("not a regular file")
            text = os.read(opened, LARGEST_FILE + 1)
        finally:
            os.close(opened)
        if len(text) > LARGEST_FILE:
            raise Corrupt(f"more than {LARGEST_FILE} bytes")
        return decode(text)

    def write(self, state: State) -> None:
        """Replace the file by `state`, whole or not at all, readable by its owner only."""
        self._scratch.unlink(missing_ok=True)
        opened = os.open(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
        text = state.encode()
        try:
            whole = os.write(opened, text) == len(text)
        finally:
            os.close(opened)
        if not whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(self._scratch, self.path)

    def put_aside(self) -> None:
        """Rename what is in the file's place, which may even be a folder."""
        os.rename(self.path, self.path.with_suffix(".aside"))


class Keeper:
    """One daemon thread for jobs that may hang; it calls `look` after `tick` idle seconds."""

    def __init__(self, look: Callable[[], None], tick: float) -> None:
        self._look = look
        self._tick = tick
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mlx-shim-state", daemon=True).start()

    def post(self, job: Callable[[], T]) -> Future[T]:
        """Have `job` done in its turn.

        `result(seconds)` of what is returned waits for it, and raises concurrent.futures'
        TimeoutError.
        """
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def _run(self) -> None:
        while True:
            try:
                future, job = self._jobs.get(timeout=self._tick)
            except queue.Empty:
                self._look()
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
