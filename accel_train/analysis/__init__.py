"""What is done with a finished run: evaluation and predictions."""
