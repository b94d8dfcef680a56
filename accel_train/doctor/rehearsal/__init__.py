"""Checks that start a training of their own through a launcher of the same kind, and interrupt it."""
