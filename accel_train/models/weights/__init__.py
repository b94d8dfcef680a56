"""Weights that a model starts from: where they come from, how they are read, and what is loaded into what."""
