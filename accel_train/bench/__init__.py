"""Benchmarks: how fast a recipe trains, and what limits its speed."""
