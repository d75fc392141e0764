"""What a setting may be written as: each parser takes text, and raises a ValueError that says what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from . import memory

OFF, ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")
SMALLEST_KV_SIZE = 16
SHORTEST_DEADLINE = (
    2.0  # seconds: the watchdog puts it off once a second at best, and on a busy machine later
)
SMALLEST_LOG_QUEUE = 64 << 10  # bytes
AUTO_MARGIN = 4 << 30  # bytes wired beside a model that is large for the machine
MOST_DEATHS = 100  # that a limit of deaths may ask for
AUTO_SHARE = 0.6  # of the machine's memory: a model below it leaves enough to go without wiring
_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_switch(text: str) -> bool:
    """True or False from the usual words. Raises ValueError saying what is accepted."""
    word = text.strip().lower()
    if word in OFF or word in ON:
        return word in ON
    raise ValueError("accepted: " + ", ".join((*ON, *OFF)))


def parse_strict(text: str) -> int:
    """0, 1 or 2, or a switch's other words for 0 and 1. Raises ValueError saying what is accepted."""
    if text.strip() == "2":
        return 2
    try:
        return int(parse_switch(text))
    except ValueError as error:
        raise ValueError(f"{error}, 2") from None


def parse_duration(text: str) -> float:
    """Seconds from 90, 90s, 1.5m, 500ms or 2h. Raises ValueError saying what is accepted."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.strip().lower())
    if match is None:
        raise ValueError("accepted: a duration such as 90, 90s, 2m, 1h or 500ms")
    return float(match[1]) * _UNITS[match[2]]


def parse_deadline(text: str) -> float:
    """0, or a duration longer than the time between two looks. Raises ValueError saying what is accepted."""
    seconds = parse_duration(text)
    if 0 < seconds < SHORTEST_DEADLINE:
        raise ValueError(f"accepted: 0, or a duration of at least {SHORTEST_DEADLINE:g}s")
    return seconds


def parse_size(text: str) -> int:
    """Bytes from 4096, 512K, 512M or 12G (powers of 1024). Raises ValueError saying what is accepted."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("accepted: a size such as 1048576, 512K, 64M or 12G")
    return int(float(match[1]) * 1024 ** ("", "K", "M", "G", "T").index(match[2].upper()))


def parse_log_queue(text: str) -> int:
    """0, or bytes for a few hundred lines at least. Raises ValueError saying what is accepted."""
    size = parse_size(text)
    if 0 < size < SMALLEST_LOG_QUEUE:
        raise ValueError(f"accepted: 0, or a size of at least {SMALLEST_LOG_QUEUE >> 10}K")
    return size


def parse_memory(text: str) -> int:
    """Bytes from a size, or from a share of the machine's memory such as 80%. Raises ValueError saying what is accepted."""
    share = re.fullmatch(r"(\d{1,2}(?:\.\d+)?|100)\s*%", text.strip())
    if share is not None:
        return int((memory.total() or 0) * float(share[1]) / 100)
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(
            "accepted: a size such as 48G, or a share of the machine's memory such as 80%"
        ) from None


def parse_optional_size(text: str) -> int | None:
    """Bytes from a size, or None for stock. Raises ValueError saying what is accepted."""
    if text.strip().lower() == "stock":
        return None
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError("accepted: stock, or a size such as 512M or 12G") from None


class Limit(NamedTuple):
    """So many deaths within `window` seconds have the next start wait: `base` seconds, doubled with each further death."""

    deaths: int
    window: float
    base: float


class Wired(NamedTuple):
    """How much may be wired at most: `size` bytes, beside the model's where `model` says so."""

    size: int = 0
    model: bool = False
    auto: bool = (
        False  # none for a model that leaves enough room; for a larger one the model and `size`
    )

    def most(self, model: int, total: int) -> int:
        """Bytes that may be wired for a model of `model` bytes on a machine that has `total`.

        Before a model is loaded there is nothing to wire it for.
        """
        if self.auto and model < AUTO_SHARE * total:
            return 0
        if self.model:
            return model + self.size if model else 0
        return self.size


def parse_wired(text: str) -> Wired | None:
    """None for stock; off, a size, a share of memory, model+SIZE, or auto. Raises ValueError saying what is accepted."""
    word = text.strip().lower()
    if word == "stock":
        return None
    try:
        if word in OFF:
            return Wired()
        if word == "auto":
            return Wired(AUTO_MARGIN, model=True, auto=True)
        beside = word.removeprefix("model+")
        return Wired(parse_memory(beside), model=beside != word)
    except ValueError:
        raise ValueError(
            "accepted: stock, off, auto, a size such as 12G, a share such as 60%, or model+4G"
        ) from None


def parse_count(text: str) -> int:
    """A whole number, zero or more. Raises ValueError saying what is accepted."""
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        raise ValueError("accepted: a whole number such as 32768; 0 is none")
    return int(text)


def parse_kv_size(text: str) -> int:
    """0, or tokens for a rotating cache, which keeps the first 4 for good. Raises ValueError saying what is accepted."""
    count = parse_count(text)
    if 0 < count < SMALLEST_KV_SIZE:
        raise ValueError(f"accepted: 0 or at least {SMALLEST_KV_SIZE}")
    return count


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def parse_breaker(text: str) -> Limit | None:
    """5/10m, or with the first wait 5/10m,10s; None for 0 or off. Raises ValueError saying what is accepted."""
    if text.strip().lower() in OFF:
        return None
    deaths, _, rest = text.partition("/")
    window, comma, base = rest.partition(",")
    try:
        limit = Limit(
            parse_count(deaths), parse_duration(window), parse_duration(base if comma else "10s")
        )
    except ValueError:
        limit = Limit(0, 0, 0)
    if 1 <= limit.deaths <= MOST_DEATHS and limit.window and limit.base:
        return limit
    raise ValueError(
        f"accepted: deaths (1 to {MOST_DEATHS}) and a duration such as 5/10m, or with the first wait 5/10m,10s; 0 is none"
    )


def parse_choice(*choices: str) -> Callable[[str], str]:
    """A parser that accepts just these words."""

    def parse(text: str) -> str:
        if text.strip().lower() in choices:
            return text.strip().lower()
        raise ValueError("accepted: " + ", ".join(choices))

    return parse
