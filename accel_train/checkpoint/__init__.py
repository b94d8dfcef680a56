"""Checkpoints: written whole or not at all, read without executing anything, resumed by any number of processes."""
