"""What every guarded server runs: it watches the stock server, keeps the facts about it in one place, and ends it."""
