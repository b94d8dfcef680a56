"""`accel-train doctor`: checks of nodes, data and job limits before a long run."""
