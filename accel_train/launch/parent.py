"""The process that started this one, if it is accelerate launch or torchrun."""

from __future__ import annotations

import contextlib
import os
from itertools import pairwise
from pathlib import Path

import psutil

from accel_train.untrusted import read_regular_file

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


def asked_of_accelerate(command: list[str], name: str) -> int | None:
    """The number that `accelerate launch` was given for an option such as num_processes, on its command line or in the
    config file that it names; None if neither says one."""

    def on_line(option: str) -> str | None:
        spellings = (f"--{option}", f"--{option.replace('_', '-')}")
        for word, following in pairwise([*command, ""]):
            key, equals, value = word.partition("=")
            if key in spellings:
                return value if equals else following
        return None

    given: object = on_line(name)
    if given is None and (file := on_line("config_file")):
        import yaml

        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            values = yaml.safe_load(read_regular_file(Path(file), follow=True))
            given = values.get(name) if isinstance(values, dict) else None
    return int(str(given)) if str(given).isdecimal() else None


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
