"""`accel-train doctor`: what will go wrong in the next twenty hours of a training."""
