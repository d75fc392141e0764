"""Runs in every guarded server: watches stock, keeps the facts about it, and ends the process."""
