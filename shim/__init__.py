"""Keeps Apple's stock mlx_lm.server alive and honest. See docs/how-it-works.md."""

__version__ = "0.1.0"
