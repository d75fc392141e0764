"""How the shim wraps what belongs to mlx_lm: through wrapt, or without it where wrapt cannot be used."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from . import report

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
        callable(getattr(wrapt, n, None)) for n in ("wrap_function_wrapper", "register_post_import_hook")
    ):
        return None, f"the module wrapt at {getattr(wrapt, '__file__', '?')} is not the package wrapt"
    if numbers < OLDEST_WRAPT or numbers == BROKEN_WRAPT:
        return None, f"wrapt {version} cannot be used (wanted: 1.16 or newer, not 2.2.0)"
    return wrapt, ""


wrapt, missing = _import_wrapt()


def wrap(module: Any, path: str, wrapper: Wrapper) -> None:
    """Wrap the function at `path` in `module`, such as "ResponseGenerator._generate". AttributeError if it is not there."""
    if wrapt is not None:
        wrapt.wrap_function_wrapper(module, path, wrapper)
        return
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, module)
    stock = getattr(owner, name)

    if isinstance(owner, type):

        @functools.wraps(stock)
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(stock.__get__(self), self, args, kwargs)

    else:

        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(stock, None, args, kwargs)

    setattr(owner, name, replacement)


def after(note: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> Wrapper:
    """A wrapper that calls stock and then `note(instance, args, kwargs, result)`.

    It runs where an exception would kill the server: what `note` raises is said once, and from then on it is left out.
    """
    working = True

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal working
        result = wrapped(*args, **kwargs)
        if working:
            try:
                note(instance, args, kwargs, result)
            except Exception as error:
                working = False
                report.line(f"{note.__module__}.{note.__name__} failed and is off from now on: {error!r}")
        return result

    return wrapper
