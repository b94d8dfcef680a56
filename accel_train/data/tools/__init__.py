"""Work on a whole data set before training."""
