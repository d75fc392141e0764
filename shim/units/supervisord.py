"""Makes a program section for supervisord, with advice.

supervisord has no socket that outlives a process: its fcgi-program closes the socket when no
process of the group is left (supervisor/socket_manager.py counts them). With --socket the group has
a second process, which only holds the socket.
"""

from __future__ import annotations

import re
import shlex

from . import Refused
from .plan import OPEN_FILES, Made, Unit, host_and_port

# supervisord replaces this before anything else, escaped or not.
_HERE = "%(here)s"
# Process 0 holds the socket, 1 is the server. The socket is descriptor 0 in FastCGI, and 3 in the
# protocol of systemd.
_HOLDER = 'test "$0" = 0 && exec sleep 2147483647; exec env LISTEN_PID=$$ "$@" 3<&0 </dev/null'


def made(unit: Unit) -> Made:
    """NAME.conf. Raises Refused for what supervisord's format cannot hold."""
    command = " ".join(_word(word) for word in unit.argv)
    environ = dict(unit.environ)
    if unit.socket:
        command = f"/bin/sh -c {_word(_HOLDER)} %(process_num)s {command}"
        environ["LISTEN_FDS"] = "1"
    lines = [
        f"[{'fcgi-program' if unit.socket else 'program'}:{unit.name}]",
        f"command={command}",
        *([f"socket=tcp://{host_and_port(unit)}"] if unit.socket else []),
        *(["numprocs=2", "process_name=%(program_name)s_%(process_num)s"] if unit.socket else []),
        "environment=" + ",".join(_pair(name, value) for name, value in sorted(environ.items())),
        f"directory={_path(unit.workdir)}",
        *([f"user={unit.user}"] if unit.user else []),
        "autostart=true",
        "autorestart=true",
        "startsecs=1",
        "startretries=1000000",
        "stopsignal=TERM",
        f"stopwaitsecs={unit.stop_limit}",
        "stopasgroup=false",
        "killasgroup=true",
        "redirect_stderr=true",
        # supervisor/options.py expands this option twice, and no other.
        *([f"stdout_logfile={_path(unit.log).replace('%', '%%')}"] if unit.log else []),
    ]
    return Made({f"{unit.name}.conf": "\n".join(lines) + "\n"}, _advice(unit))


def _word(word: str) -> str:
    """Write a word of the command for shlex and for supervisord's % and comments."""
    _refuse_here(word)
    # White space before ; or # begins a comment, even within quotes.
    pieces = re.split(r"(?<=\s)(?=[;#])", word)
    return "".join(shlex.quote(piece) for piece in pieces).replace("%", "%%")


def _pair(name: str, value: str) -> str:
    """Write NAME="VALUE". supervisord knows no escapes and strips all quotes at both ends."""
    _refuse_here(value)
    if (
        value.strip("'\"") != value
        or ('"' in value and "'" in value)
        or re.search(r"\s[;#]", value)
    ):
        raise Refused(
            f"the value of {name} cannot be written for supervisord: no quotes at its ends, not"
            " both kinds of quotes, and no ; or # after a space"
        )
    quote = "'" if '"' in value else '"'
    return f"{name}={quote}{value}{quote}".replace("%", "%%")


def _path(path: str) -> str:
    _refuse_here(path)
    if re.search(r"\s[;#]", path):
        raise Refused(
            f"{path!r} cannot be written for supervisord:"
            " ; or # after a space begins a comment there"
        )
    return path.replace("%", "%%")


def _refuse_here(text: str) -> None:
    if _HERE in text:
        raise Refused(f"{text!r} cannot be written for supervisord: it replaces {_HERE}")


def _advice(unit: Unit) -> list[str]:
    name = f"{unit.name}:{unit.name}_1" if unit.socket else unit.name
    holder = (
        f"{unit.name}_0 only holds the socket: supervisord closes it when no process of the group"
        " is left. A client that connects while the model loads again waits instead of being"
        " refused."
        f" Restart {unit.name}_1, not the group."
    )
    return [
        f"save it as {unit.name}.conf in a folder that supervisord.conf includes, then:",
        (
            "  supervisorctl reread && supervisorctl update"
            "    # install: start now, and with supervisord"
        ),
        (
            f"  supervisorctl status {name}"
            "    # look; supervisord's own log has the statuses (docs/exit-codes.md)"
        ),
        f"  supervisorctl tail -f {name}",
        f"  supervisorctl restart {name}    # restart: drains for at most {unit.stop_limit} s",
        (
            f"  supervisorctl stop {unit.name}{':*' if unit.socket else ''}"
            "    # stop; remove the file and `update`"
        ),
        (
            "autorestart=true: supervisord starts it again at once, whatever the status;"
            " `supervisorctl stop` stops it. A server that ends within startsecs is tried again"
            " after 1, 2, 3 ... seconds, startretries times."
        ),
        (
            f"stopwaitsecs={unit.stop_limit}: SIGKILL that long after SIGTERM. The drain, and"
            " telling the clients, take less."
        ),
        (
            "minfds in [supervisord], 1024 unless set, is how many files the server may have open;"
            f" {OPEN_FILES} is plenty."
        ),
        *([holder] if unit.socket else []),
    ]
