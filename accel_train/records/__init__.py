"""The files that a run writes, and what it prints."""
