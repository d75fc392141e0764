"""What goes into the environment of a unit: PYTHONPATH, the shim's switches, what was asked for; never a secret."""

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
_MARGIN = 5  # seconds for stock's own orderly shutdown, on top of what the shim waits for
_LEAST_STOP = 30  # seconds
# Names that hold a secret, word by word: MLX_SHIM_MAX_TOKENS and TOKENIZERS_PARALLELISM do not.
_SECRET = re.compile(r"\w*(KEY|APIKEY|TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIAL|CREDENTIALS)")
_HARMLESS_END = ("FILE", "PATH", "DIR", "FOLDER")
_SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_)\w{12,}|\w+://[^/\s:@]*:[^/\s@]+@")
# What a shell may have, a supervisor does not pass on, and decides where the server finds its models.
_OF_THE_SERVER = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")
# The unit's own, put in where --socket asks for them.
LAUNCHD_SOCKET = settings.variable("launchd_socket")


def secret(name: str, value: str) -> str:
    """Why a variable must not stand in a unit, which others can read, and what to use instead; or the empty string."""
    if name in _DEFAULTS:
        return ""
    words = name.upper().split("_")
    if words[-1] not in _HARMLESS_END and any(_SECRET.fullmatch(word) for word in words):
        return f"its name says it holds a secret, and a unit can be read by others; use {_instead(name)}"
    if _SECRET_VALUE.match(value):
        return (
            f"its value looks like a secret, and a unit can be read by others; use {_instead(name)}"
        )
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
            raise Refused(f"--env takes NAME=VALUE, not {name[:40]!r}")  # the value may be a secret
        found[name] = value
    return found


def collect(asked: Mapping[str, str], folder: Path, current: Mapping[str, str]) -> dict[str, str]:
    """The environment of the unit, from --env and the MLX_SHIM* of the current environment. Raises Refused."""
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
    if (
        kind == "file" and not Path(path).is_file()
    ):  # the value may be the secret itself: it is not shown
        raise Refused(
            f"{name} names no file that is there; it takes the name of a file that holds the secret"
        )
    return path


def absolute(path: str) -> str:
    """Absolute, with ~ replaced; links stay, since a virtual environment's python is one."""
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - Path.resolve follows links


def seconds(environ: Mapping[str, str], name: str, default: str = "") -> float:
    """A duration of the environment, or its default. Raises Refused."""
    value = environ.get(name, "").strip() or _DEFAULTS.get(name, default)
    parse = values.parse_deadline if name == GIL_DEADLINE else values.parse_duration
    try:
        return parse(value)
    except ValueError as error:
        raise Refused(f"{name}={value!r} is not valid; {error}") from None


def drain(environ: Mapping[str, str]) -> float:
    """Seconds that the server may take to stop: what is in flight, then telling the clients. Raises Refused."""
    return seconds(environ, DRAIN, _DEFAULT_DRAIN) + seconds(environ, EXIT_GRACE)


def stop_limit(environ: Mapping[str, str]) -> int:
    """Seconds that a supervisor is to wait before it kills. Raises Refused."""
    return max(_LEAST_STOP, math.ceil(drain(environ)) + _MARGIN)


def doubts(environ: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """What is probably not meant in the environment of a unit."""
    _, bad, unknown = settings.load(environ)
    found = [*bad, *unknown]
    if environ.get(settings.KILL_SWITCH, "").strip().lower() in values.OFF:
        found.append(
            f"{settings.KILL_SWITCH} is off, here or in --env: the unit runs stock, without the shim"
        )
    found += [
        f"{name} is set here, and the unit does not have it; if the server needs it, add --env {name}=..."
        for name in _OF_THE_SERVER
        if current.get(name) and name not in environ
    ]
    return found
