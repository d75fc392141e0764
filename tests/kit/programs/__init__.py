"""Programs that a test starts in a process of its own."""
