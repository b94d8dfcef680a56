"""Commands about runs: use a trained model, look at it, list them."""
