"""accel_train: the same training run of an image classifier on a laptop, one GPU, many GPUs and many nodes."""

__version__ = "0.1.0"
