"""The releases of mlx-lm that this shim was tried with. Only the doctor uses the list."""

from __future__ import annotations

TRIED = ("0.30.7", "0.31.0", "0.31.1", "0.31.2", "0.31.3", "0.32.0", "0.32.1", "0.32.2")


def verdict(release: str) -> str:
    """Say whether this release of mlx-lm was tried. The guards decide by what they find."""
    if release in TRIED:
        return f"mlx-lm {release} is one of the releases this shim was tried with"
    tried = ", ".join(TRIED)
    return (
        f"mlx-lm {release} has not been tried with this shim (tried: {tried});"
        " the states below say what is lost"
    )
