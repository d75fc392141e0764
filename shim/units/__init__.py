"""Units for launchd, systemd and supervisord: this package makes them and checks them."""

from __future__ import annotations


class Refused(Exception):
    """The input makes no unit. The message says why and what is accepted instead."""
