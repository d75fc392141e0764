"""`python -m shim probe URL` asks the server at URL whether it makes a token.

It is for cron, a launchd job with StartInterval, or a load balancer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..core.values import parse_duration

HELP = "ask a server whether it makes a token: status 0 yes, 1 no, 2 it cannot tell"
OK, NO_TOKEN, UNTOLD = 0, 1, 2
PATH = "/health/generate"
# Seconds for the answer itself, after the timeout.
MARGIN = 5.0
# Seconds until the next try, after a refused connection.
RETRY_PAUSE = 0.5
# Of the status words of a 503, those that a restart can cure.
_BAD = ("dead", "failed", "no_token", "stalled")
_SERVICE_UNAVAILABLE = 503


class Told(NamedTuple):
    """The exit status of the command, and the line that it prints."""

    status: int
    line: str


def add_to(commands: Any) -> None:
    """Add the subcommand and its arguments."""
    parser = commands.add_parser("probe", help=HELP, allow_abbrev=False)
    parser.add_argument("url", help="such as http://127.0.0.1:8080")
    parser.add_argument("--timeout", default="20s", help="how long a token may take (20s)")
    parser.add_argument(
        "--key-file", help="the file of MLX_SHIM_API_KEY_FILE, if the server has one"
    )
    parser.add_argument(
        "--restart", metavar="COMMAND", help="a command for the shell, run if the status is 1"
    )


def main(options: argparse.Namespace) -> int:
    try:
        seconds = parse_duration(options.timeout)
        headers = _headers(options.key_file)
        told = _ask(options.url, seconds, headers)
    except (OSError, ValueError) as error:
        told = Told(UNTOLD, str(error))
    print(told.line, flush=True)
    if told.status == NO_TOKEN and options.restart:
        status = subprocess.run(options.restart, shell=True, check=False).returncode  # noqa: S602
        print(f"{options.restart}: status {status}", flush=True)
    return told.status


def _headers(key_file: str | None) -> dict[str, str]:
    if key_file is None:
        return {}
    return {"Authorization": f"Bearer {Path(key_file).expanduser().read_text().strip()}"}


def _ask(url: str, seconds: float, headers: dict[str, str]) -> Told:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not the URL of a server, such as http://127.0.0.1:8080")
    path = parts.path if parts.path.strip("/") else PATH
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    deadline = time.monotonic() + seconds
    while True:
        connection = kind(parts.hostname, parts.port, timeout=seconds + MARGIN)
        try:
            connection.request("GET", f"{path}?timeout={seconds:g}", headers=headers)
            answer = connection.getresponse()
            return _judged(answer.status, answer.read())
        except socket.gaierror as error:
            return Told(UNTOLD, f"{parts.hostname}: {error.strerror}")
        except ConnectionRefusedError as error:
            # A server that has just started does not listen yet.
            if time.monotonic() + RETRY_PAUSE >= deadline:
                return Told(NO_TOKEN, f"nobody listens at {parts.netloc}: {error.strerror}")
        except (OSError, http.client.HTTPException) as error:
            return Told(NO_TOKEN, f"no answer from {parts.netloc}: {error!r}")
        finally:
            connection.close()
        time.sleep(RETRY_PAUSE)


def _judged(status: int, raw: bytes) -> Told:
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    word = body.get("status") if isinstance(body, dict) else None
    if status == http.client.OK and word == "ok":
        return Told(OK, f"ok: a token within {body['seconds']:g} s ({body['by']})")
    if status == _SERVICE_UNAVAILABLE and word is not None:
        reason = str(body.get("reason", ""))
        return Told(NO_TOKEN if word in _BAD else UNTOLD, f"{word}: {reason}")
    return Told(UNTOLD, f"answered {status}: a server under the shim has {PATH}")
