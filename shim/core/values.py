"""The parsers of settings. Each takes text, and raises a ValueError that says what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from . import memory

# The words of a switch.
OFF, ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")
# Tokens.
SMALLEST_KV_SIZE = 16
# Seconds. The watchdog postpones the deadline once a second, and on a busy machine less often.
SHORTEST_DEADLINE = 2.0
# Bytes that may be wired in addition to a model that is large for the machine.
AUTO_MARGIN = 4 << 30
# The largest number of deaths that MLX_SHIM_BREAKER accepts.
MOST_DEATHS = 100
# A share of the machine's memory. A model below it leaves enough memory to do without wiring.
AUTO_SHARE = 0.6
# Seconds in each unit of a duration.
_SECONDS_PER_UNIT = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_switch(text: str) -> bool:
    """Return True for one of the words in ON, False for one in OFF."""
    word = text.strip().lower()
    if word in OFF or word in ON:
        return word in ON
    raise ValueError("accepted: " + ", ".join((*ON, *OFF)))


def parse_strict(text: str) -> int:
    """Return 0, 1 or 2. The words of a switch stand for 0 and 1."""
    if text.strip() == "2":
        return 2
    try:
        return int(parse_switch(text))
    except ValueError as error:
        raise ValueError(f"{error}, 2") from None


def parse_duration(text: str) -> float:
    """Return the seconds in a duration such as 90, 90s, 1.5m, 500ms or 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.strip().lower())
    if match is None:
        raise ValueError("accepted: a duration such as 90, 90s, 2m, 1h or 500ms")
    return float(match[1]) * _SECONDS_PER_UNIT[match[2]]


def parse_deadline(text: str) -> float:
    """Return the seconds in 0, or in a duration of at least SHORTEST_DEADLINE."""
    seconds = parse_duration(text)
    if 0 < seconds < SHORTEST_DEADLINE:
        raise ValueError(f"accepted: 0, or a duration of at least {SHORTEST_DEADLINE:g}s")
    return seconds


def parse_size(text: str) -> int:
    """Return the bytes in a size such as 4096, 512K, 512M or 12G (powers of 1024)."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("accepted: a size such as 1048576, 512K, 64M or 12G")
    return int(float(match[1]) * 1024 ** ("", "K", "M", "G", "T").index(match[2].upper()))


def parse_memory(text: str) -> int:
    """Return the bytes in a size, or in a share of the machine's memory such as 80%."""
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
    """Return the bytes in a size, or None for stock."""
    if text.strip().lower() == "stock":
        return None
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError("accepted: stock, or a size such as 512M or 12G") from None


class Limit(NamedTuple):
    """The limit after which a start has to wait: `deaths` within `window` seconds.

    The wait is `base` seconds, and doubles with each further death.
    """

    deaths: int
    window: float
    base: float


class Wired(NamedTuple):
    """The limit of wired memory."""

    # Bytes.
    size: int = 0
    # Whether the bytes of the model are added to `size`.
    model: bool = False
    # Whether nothing is wired for a model that leaves enough memory free.
    auto: bool = False

    def most(self, model: int, total: int) -> int:
        """Return how many bytes may be wired.

        `model` is the size of the model, `total` the memory of the machine, both in bytes. Before
        a model is loaded, `model` is 0 and nothing is wired for one.
        """
        if self.auto and model < AUTO_SHARE * total:
            return 0
        if self.model:
            return model + self.size if model else 0
        return self.size


def parse_wired(text: str) -> Wired | None:
    """Return the limit in off, a size, a share of memory, model+SIZE or auto; None for stock."""
    word = text.strip().lower()
    if word == "stock":
        return None
    try:
        if word in OFF:
            return Wired()
        if word == "auto":
            return Wired(AUTO_MARGIN, model=True, auto=True)
        size = word.removeprefix("model+")
        return Wired(parse_memory(size), model=size != word)
    except ValueError:
        raise ValueError(
            "accepted: stock, off, auto, a size such as 12G, a share such as 60%, or model+4G"
        ) from None


def parse_count(text: str) -> int:
    """Return a whole number of at least zero."""
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        raise ValueError("accepted: a whole number such as 32768; 0 means none")
    return int(text)


def parse_kv_size(text: str) -> int:
    """Return 0, or the tokens of a rotating cache, which always keeps the first 4."""
    count = parse_count(text)
    if 0 < count < SMALLEST_KV_SIZE:
        raise ValueError(f"accepted: 0 or at least {SMALLEST_KV_SIZE}")
    return count


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a list that commas separate."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def parse_breaker(text: str) -> Limit | None:
    """Return the limit in 5/10m, or with the first wait in 5/10m,10s; None for 0 or off."""
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
        f"accepted: deaths (1 to {MOST_DEATHS}) and a duration such as 5/10m, "
        "or with the first wait 5/10m,10s; 0 means none"
    )


def parse_choice(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts only these words."""

    def parse(text: str) -> str:
        if text.strip().lower() in choices:
            return text.strip().lower()
        raise ValueError("accepted: " + ", ".join(choices))

    return parse
