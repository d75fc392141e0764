"""Wraps functions of mlx_lm: with wrapt, or without it where wrapt cannot be used."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import report, verdicts

# (wrapped, instance, args, kwargs) -> result, as in wrapt.
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

OLDEST_WRAPT = (1, 16)
# ddtrace excludes this version too.
BROKEN_WRAPT = (2, 2, 0)


def _import_wrapt() -> tuple[Any, str]:
    """Return (wrapt, ""), or (None, the reason why it cannot be used)."""
    try:
        # This takes about 65 ms; the import of mlx_lm, which follows, takes a second.
        import wrapt
    except ImportError as error:
        return None, f"wrapt cannot be imported ({error})"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A stub may do anything, even call sys.exit.
        return None, f"wrapt cannot be imported ({error!r})"
    version = str(getattr(wrapt, "__version__", ""))
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if not numbers or not all(
        callable(getattr(wrapt, n, None))
        for n in ("wrap_function_wrapper", "register_post_import_hook")
    ):
        return (
            None,
            f"the module wrapt at {getattr(wrapt, '__file__', '?')} is not the package wrapt",
        )
    if numbers < OLDEST_WRAPT or numbers == BROKEN_WRAPT:
        return None, f"wrapt {version} cannot be used (wanted: 1.16 or newer, not 2.2.0)"
    return wrapt, ""


wrapt, missing = _import_wrapt()


# What `undo_on_error` may have to restore: the owner, the name, the former value (None if the owner
# had none of its own), and the list in `layers`.
_journal: list[tuple[Any, str, Any, list[str]]] = []
# Which guards, and which other modules of the shim, have wrapped each function of stock: the
# innermost first.
layers: dict[str, list[str]] = {}


def wrap(module: Any, path: str, wrapper: Wrapper) -> None:
    """Wrap the function at `path` in `module`, such as "ResponseGenerator._generate".

    Raises verdicts.Incompatible if there is no such function, or if it is a generator or a
    coroutine function: the call of one returns before it has done anything, so a wrapper would see
    nothing.
    """
    stock = verdicts.find(module, path)
    plain = inspect.unwrap(stock)
    if inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain):
        raise verdicts.Incompatible(f"{path} of {module.__name__} is a generator or coroutine")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, module)
    # A trial wraps functions of a copy, which is not a module; those are not listed.
    known = isinstance(module, types.ModuleType)
    wrappers = layers.setdefault(_full_name(owner, name), []) if known else []
    wrappers.append(_name_of(wrapper))
    _journal.append((owner, name, vars(owner).get(name), wrappers))
    if wrapt is not None:
        wrapt.wrap_function_wrapper(module, path, wrapper)
        return

    if isinstance(owner, type):

        @functools.wraps(stock)
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(stock.__get__(self), self, args, kwargs)

    else:

        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(stock, None, args, kwargs)

    setattr(owner, name, replacement)


def _full_name(owner: Any, name: str) -> str:
    """Name a function by its owner, so that it has one name in every module that imports it."""
    return f"{owner.__qualname__ if isinstance(owner, type) else owner.__name__}.{name}"


def _name_of(wrapper: Any) -> str:
    """Return the last part of the name of the module that defines the wrapper."""
    note = getattr(wrapper, "note", wrapper)
    module = getattr(getattr(note, "__self__", note), "__module__", "") or type(note).__module__
    return str(module).rpartition(".")[2]


def try_wrap(module: Any, path: str, wrapper: Wrapper) -> bool:
    """Wrap a function that a guard can do without. Return whether it was wrapped."""
    try:
        wrap(module, path, wrapper)
    except verdicts.Incompatible:
        return False
    return True


@contextlib.contextmanager
def undo_on_error() -> Iterator[None]:
    """If the body raises, unwrap what the body has wrapped, so that stock is as before.

    After verdicts.Refused the wrappers stay: a guard that cannot do what its setting asks for has
    closed what it could.
    """
    begin = len(_journal)
    try:
        yield
    except verdicts.Refused:
        raise
    except BaseException:
        while len(_journal) > begin:
            owner, name, former, wrappers = _journal.pop()
            wrappers.pop()
            if former is None:
                delattr(owner, name)
            else:
                setattr(owner, name, former)
        raise


def given(
    wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, position: int
) -> Any:
    """Return one argument of a call that a wrapper has received, or None if it was not given.

    The argument is looked up by its name, else by its position in the signature of stock's
    function. `position`, which does not count self, is used where the signature does not tell.
    """
    if name in kwargs:
        return kwargs[name]
    index = _position(getattr(inspect.unwrap(wrapped), "__func__", wrapped), name, position)
    return args[index] if len(args) > index else None


@functools.lru_cache(maxsize=256)
def _position(function: Any, name: str, otherwise: int) -> int:
    try:
        names = [n for n in inspect.signature(function).parameters if n != "self"]
    except (TypeError, ValueError):
        return otherwise
    return names.index(name) if name in names else otherwise


def after(
    note: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
    lost: Callable[[str], None] | None = None,
) -> Wrapper:
    """Return a wrapper that calls stock and then `note(instance, args, kwargs, result)`.

    The wrapper runs where an exception would kill the server. So if `note` raises, the wrapper
    reports that once, calls `lost` with the reason if `lost` is given, and from then on no longer
    calls `note`.
    """
    working = True

    def wrapper(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        nonlocal working
        result = wrapped(*args, **kwargs)
        if working:
            try:
                note(instance, args, kwargs, result)
            except Exception as error:
                working = False
                if lost is not None:
                    lost(f"{type(error).__name__}: {error}")
                package, _, module = note.__module__.rpartition(".")
                if package.endswith(".guards"):
                    report.mark_failed(module, f"{note.__name__} is off from now on: {error!r}")
                else:
                    function = f"{note.__module__}.{note.__name__}"
                    report.line(f"{function} failed and is off from now on: {error!r}")
        return result

    # `_name_of` reads this.
    wrapper.note = note  # type: ignore[attr-defined]
    return wrapper
