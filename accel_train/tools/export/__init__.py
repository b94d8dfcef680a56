"""A run's model for other programs: its formats, and the preprocessing that belongs to it."""
