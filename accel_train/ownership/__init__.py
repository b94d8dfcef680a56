"""Which start of a run owns its directory, so that a run has one writer."""
