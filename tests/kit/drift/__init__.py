"""Stock with one name changed: the copies, the servers that run them, the table of results."""
