"""What a run cost: where its time went, over all starts, and what its devices used."""
