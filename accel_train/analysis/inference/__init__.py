"""A model's probabilities for images: how they are prepared, views of them, calibration, the most probable classes."""
