"""The command line: what `accel-train COMMAND` understands. Nothing imports it but the programs themselves."""

from accel_train.cli.dispatch import main

__all__ = ["main"]
