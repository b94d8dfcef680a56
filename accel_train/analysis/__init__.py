"""Uses of a trained model: evaluation and predictions."""
