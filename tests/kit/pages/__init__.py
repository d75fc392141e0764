"""Pages of docs/ that are made from the code or from a run."""
