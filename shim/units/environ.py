"""The environment of a unit: PYTHONPATH, the shim's settings, and --env. Never a secret."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core import settings, values
from . import Refused

KEY_FILE = settings.variable("api_key_file")
_DEFAULTS = {row.variable: row.default for row in settings.table()}
DRAIN, EXIT_GRACE, GIL_DEADLINE = (
    settings.variable(name) for name in ("drain", "exit_grace", "gil_deadline")
)
_DEFAULT_DRAIN = _DEFAULTS.get(DRAIN, "25s")
# Seconds for stock's own shutdown, on top of the time that the shim waits.
_STOCK_STOP = 5
_LEAST_STOP = 30  # seconds
# A name holds a secret if one of its words is such: MLX_SHIM_MAX_TOKENS and TOKENIZERS_PARALLELISM
# are harmless.
_SECRET = re.compile(r"\w*(KEY|APIKEY|TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIAL|CREDENTIALS)")
_HARMLESS_END = ("FILE", "PATH", "DIR", "FOLDER")
_SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_)\w{12,}|\w+://[^/\s:@]*:[^/\s@]+@")
# They decide where the server finds its models. A shell may have them, and a supervisor does not
# pass them on.
_HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")
# The unit of launchd gets it with --socket.
LAUNCHD_SOCKET = settings.variable("launchd_socket")


def secret(name: str, value: str) -> str:
    """Say why a variable must not be in a unit and what to use instead; else the empty string.

    Others can read a unit.
    """
    if name in _DEFAULTS:
        return ""
    words = name.upper().split("_")
    if words[-1] not in _HARMLESS_END and any(_SECRET.fullmatch(word) for word in words):
        what = "its name says it holds a secret"
    elif _SECRET_VALUE.match(value):
        what = "its value looks like a secret"
    else:
        return ""
    return f"{what}, and a unit can be read by others; use {_instead(name)}"
    return ""


def _instead(name: str) -> str:
    if name.upper().startswith("HF_") or "HUGGING" in name.upper():
        return "the hub's token file, which `hf auth login` writes"
    return f"a file: for the key that clients must bring, {KEY_FILE} names one"


def given(words: Sequence[str]) -> dict[str, str]:
    """The variables of --env NAME=VALUE. Raises Refused."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # The value may be a secret: it is not shown.
            raise Refused(f"--env takes NAME=VALUE, not {name[:40]!r}")
        found[name] = value
    return found


def collect(asked: Mapping[str, str], folder: Path, current: Mapping[str, str]) -> dict[str, str]:
    """The environment of the unit: --env, and the MLX_SHIM* of the current environment.

    Raises Refused.
    """
    ours = {
        name: value
        for name, value in current.items()
        if (name == settings.KILL_SWITCH or name.startswith(settings.PREFIX + "_"))
        and value.strip()
    }
    environ = ours | dict(asked)
    for name, value in environ.items():
        why = secret(name, value)
        if why:
            raise Refused(f"{name} is not put into a unit: {why}")
        if not value.isprintable():
            raise Refused(
                f"the value of {name} has a newline or another character that cannot be printed"
            )
    for row in settings.table():
        if row.kind in ("file", "folder") and environ.get(row.variable, "").strip():
            environ[row.variable] = _path(row.variable, environ[row.variable], row.kind)
    environ["PYTHONPATH"] = os.pathsep.join(
        [
            str(folder),
            *(
                absolute(p)
                for p in asked.get("PYTHONPATH", "").split(os.pathsep)
                if p and Path(p) != folder
            ),
        ]
    )
    return environ


def _path(name: str, value: str, kind: str) -> str:
    path = absolute(value.strip())
    # The value may be the secret itself: it is not shown.
    if kind == "file" and not Path(path).is_file():
        raise Refused(
            f"{name} names no file that exists; it takes the name of a file that holds the secret"
        )
    return path


def absolute(path: str) -> str:
    """Absolute, with ~ replaced. Links stay: the python of a virtual environment is a link."""
    # Not Path.resolve, which follows links.
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111


def seconds(environ: Mapping[str, str], name: str, default: str = "") -> float:
    """A duration of the environment, or its default. Raises Refused."""
    value = environ.get(name, "").strip() or _DEFAULTS.get(name, default)
    parse = values.parse_deadline if name == GIL_DEADLINE else values.parse_duration
    try:
        return parse(value)
    except ValueError as error:
        raise Refused(f"{name}={value!r} is not valid; {error}") from None


def drain(environ: Mapping[str, str]) -> float:
    """Seconds that the server may take to stop: requests in flight, then telling the clients.

    Raises Refused.
    """
    return seconds(environ, DRAIN, _DEFAULT_DRAIN) + seconds(environ, EXIT_GRACE)


def stop_limit(environ: Mapping[str, str]) -> int:
    """Seconds that a supervisor must wait before it kills. Raises Refused."""
    return max(_LEAST_STOP, math.ceil(drain(environ)) + _STOCK_STOP)


def doubts(environ: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Say what in the environment of a unit is probably a mistake."""
    _, bad, unknown = settings.load(environ)
    found = [*bad, *unknown]
    if environ.get(settings.KILL_SWITCH, "").strip().lower() in values.OFF:
        found.append(
            f"{settings.KILL_SWITCH} is off, here or in --env:"
            " the unit runs stock, without the shim"
        )
    found += [
        f"{name} is set here, and the unit does not have it;"
        f" if the server needs it, add --env {name}=..."
        for name in _HUB_VARIABLES
        if current.get(name) and name not in environ
    ]
    return found
