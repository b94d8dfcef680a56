"""Train an image classifier with the same run on a laptop, one GPU, many GPUs and many nodes."""

__version__ = "0.2.0"
