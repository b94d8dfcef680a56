"""Which start of a run owns its directory."""
