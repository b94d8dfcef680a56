"""Runs as the jobs of a batch system: their submission, and their states in its queue."""
