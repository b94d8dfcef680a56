"""The order of the samples, and the random numbers of each sample."""
