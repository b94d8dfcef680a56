"""What training does not need: checks, evaluation of a run, reports, exports, jobs of a cluster."""
