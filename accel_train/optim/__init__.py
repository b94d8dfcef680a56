"""Everything that changes the weights: loss, optimizer, learning-rate schedule, clipping, EMA."""
