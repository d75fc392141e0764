"""The releases of mlx-lm that this shim was tried with. The doctor says so; nothing else is decided by it."""

from __future__ import annotations

TRIED = ("0.30.7", "0.31.0", "0.31.1", "0.31.2", "0.31.3", "0.32.0", "0.32.1", "0.32.2")


def verdict(release: str) -> str:
    """What is to be said of this release of mlx-lm. Guards go by what they find, whether or not it was tried."""
    if release in TRIED:
        return f"mlx-lm {release} is one of the releases this shim was tried with"
    tried = ", ".join(TRIED)
    return f"mlx-lm {release} has not been tried with this shim (tried: {tried}); the states below say what is lost"
