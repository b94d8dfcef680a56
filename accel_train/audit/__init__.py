"""`accel-train check-data`: an audit of a data set, before anything is trained on it."""
