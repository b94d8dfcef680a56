"""Metrics that only some runs need: those of several labels an image, AUROC, and a user's own."""
