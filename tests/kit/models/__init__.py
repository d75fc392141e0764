"""Models for tests: tiny, hybrid, large, or faulty."""
