"""Units for launchd, systemd and supervisord: made for a server command, or read to say what in them defeats the shim."""

from __future__ import annotations


class Refused(Exception):
    """What was given makes no unit, and what is accepted instead."""
