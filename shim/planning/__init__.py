"""How much memory a model takes and what to leave free, for the command line. No server imports this."""
