"""How much memory a model takes and how much to leave free."""
