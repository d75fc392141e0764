"""Stock with one name changed: the copies, the server that starts them, and the table of what was seen."""
