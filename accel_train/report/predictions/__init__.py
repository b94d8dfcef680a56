"""The page of what a model answers: images with their most probable classes."""
