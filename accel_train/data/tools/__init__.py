"""Work on a whole dataset before training."""
