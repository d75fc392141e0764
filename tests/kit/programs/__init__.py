"""Programs that a test starts as a child process."""
