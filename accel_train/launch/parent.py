"""The process that started this one, if it is accelerate launch or torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}


def parent_process() -> tuple[psutil.Process, list[str]]:
    """The process that started this one, and the words of its command line; slurm/rank.sh between them is skipped.

    Raises psutil.Error.
    """
    parent = psutil.Process(os.getppid())
    command = parent.cmdline()
    if any(word.endswith("slurm/rank.sh") for word in command):
        parent = psutil.Process(parent.ppid())
        command = parent.cmdline()
    return parent, command


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is one of accelerate launch or torchrun."""
    return not LAUNCHERS.isdisjoint(Path(word).name for word in command)


def launcher_command() -> list[str]:
    """The command line of the launcher that started this process; [] if there is none or it cannot be read."""
    try:
        _, command = parent_process()
    except psutil.Error:
        return []
    return command if is_launcher(command) else []


def only_launcher_set(variable: str, option: str | None = None) -> bool:
    """Whether accelerate launch or torchrun set a variable to its own default (OMP_NUM_THREADS=1, say).

    That is so if the launcher was started without that variable, and without `option` on its command line.
    """
    if variable not in os.environ or not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        return False
    try:
        parent, command = parent_process()
        environment = parent.environ()
    except psutil.AccessDenied:  # not a launcher of this user, but a daemon of the batch system
        return False
    except psutil.Error:  # the parent is hidden or has ended
        return True
    # A job script, too, may set the variables of accelerate launch.
    return is_launcher(command) and variable not in environment and not (option and any(option in c for c in command))
