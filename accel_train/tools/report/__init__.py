"""`accel-train report`: a run, or several, as one page."""
