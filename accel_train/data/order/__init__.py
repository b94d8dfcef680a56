"""Which samples come when, and the random numbers that belong to each."""
