"""How the shim wraps what belongs to mlx_lm: through wrapt, or without it where wrapt cannot be used."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import report, verdicts

# (wrapped, instance, args, kwargs) -> result, as wrapt has it.
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

OLDEST_WRAPT = (1, 16)
BROKEN_WRAPT = (2, 2, 0)  # ddtrace excludes it as well


def _import_wrapt() -> tuple[Any, str]:
    """(wrapt, "") or (None, why it cannot be used)."""
    try:
        import wrapt  # costs about 65 ms; mlx_lm is about to take a second
    except ImportError as error:
        return None, f"wrapt cannot be imported ({error})"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a stub may do anything, sys.exit included
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


# What `undone_on_error` would have to restore: owner, name, what was there (None: nothing of its own), its layers.
_journal: list[tuple[Any, str, Any, list[str]]] = []
# For each function of stock, who has wrapped it: innermost first. A guard by its name, the rest of the shim by its module.
layers: dict[str, list[str]] = {}


def wrap(module: Any, path: str, wrapper: Wrapper) -> None:
    """Wrap the function at `path` in `module`, such as "ResponseGenerator._generate".

    Raises verdicts.Incompatible if it is not there, or is a generator function: that returns before it has done
    anything, and a wrapper around it would see nothing.
    """
    stock = verdicts.find(module, path)
    plain = inspect.unwrap(stock)
    if inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain):
        raise verdicts.Incompatible(f"{path} of {module.__name__} is a generator or coroutine")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, module)
    known = isinstance(module, types.ModuleType)  # and no copy, on which something is tried
    wrappers = layers.setdefault(_full_name(owner, name), []) if known else []
    wrappers.append(_whose(wrapper))
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
    """A function by where it is defined: what a module imports from another is the same function."""
    return f"{owner.__qualname__ if isinstance(owner, type) else owner.__name__}.{name}"


def _whose(wrapper: Any) -> str:
    """The last part of the module that a wrapper, or the object whose method it is, was defined in."""
    note = getattr(wrapper, "note", wrapper)
    module = getattr(getattr(note, "__self__", note), "__module__", "") or type(note).__module__
    return str(module).rpartition(".")[2]


def try_wrap(module: Any, path: str, wrapper: Wrapper) -> bool:
    """As `wrap`, for what a guard can do without: whether it was wrapped."""
    try:
        wrap(module, path, wrapper)
    except verdicts.Incompatible:
        return False
    return True


@contextlib.contextmanager
def undone_on_error() -> Iterator[None]:
    """Where the body raises, what it had wrapped until then is unwrapped: stock is then as it was.

    Not so at a refusal: a guard that cannot do what was asked for has closed what it could.
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
    """One argument of a call that a wrapper got: by its name, else where the signature of stock's function has it.

    `position` counts without self; it holds where the signature does not tell. None where the call does not have it.
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
    """A wrapper that calls stock and then `note(instance, args, kwargs, result)`.

    It runs where an exception would kill the server: what `note` raises is said once, to `lost` as well where it is
    given, and from then on it is left out.
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
                    report.failed(module, f"{note.__name__} is off from now on: {error!r}")
                else:
                    report.line(
                        f"{note.__module__}.{note.__name__} failed and is off from now on: {error!r}"
                    )
        return result

    wrapper.note = note  # type: ignore[attr-defined]  # whose it is
    return wrapper
