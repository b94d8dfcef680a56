"""What keeps one run alive around the training loop."""
