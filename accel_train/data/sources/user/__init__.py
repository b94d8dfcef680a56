"""Datasets of a user's own function."""
