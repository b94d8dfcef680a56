"""The command line `accel-train COMMAND`. Only the programs themselves import this package."""

from accel_train.cli.dispatch import main, program

__all__ = ["main", "program"]
