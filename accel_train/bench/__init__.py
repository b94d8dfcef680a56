"""Benchmarks: how fast a recipe trains, and what limits its speed."""

OR_SYNTHETIC = "Or measure on synthetic images: --synthetic."
"""What a user can do who does not have the data."""
