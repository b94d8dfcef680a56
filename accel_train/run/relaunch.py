"""The command that starts a run again in the way in which it was started: by itself, by a launcher or in a job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from accel_train.launch.environment import LAUNCHERS, Launch
from accel_train.records.summary import typed_program


def command_to_go_on(launch: Launch, run: Path, *options: str) -> str:
    """What a person types to go on with the run in the directory `run`, whose processes `launch` describes.

    `options`: words of settings that are to be other than the run's own.
    """
    recipe = shlex.join([f"{run}/config.yaml", "--output-dir", str(run), *options])
    program = f"python -m accel_train.train {recipe}"
    if {"RUN", "ACCEL_TRAIN_ROOT"} <= os.environ.keys():  # set by slurm/common.sh for all that it starts
        if "PBS_JOBID" in os.environ:
            option = "-V" if "'" in recipe else "-v TRAIN"  # -v makes a backslash of each quote
            return f"TRAIN={shlex.quote(recipe)} qsub {option} … pbs/train.pbs"
        return f"sbatch … slurm/NAME.sbatch {recipe}"
    if launch.launcher == "none":
        return f"{typed_program()} train {recipe}"
    if launch.launcher in ("accelerate", "torchrun"):
        unread = f"{'accelerate launch' if launch.launcher == 'accelerate' else 'torchrun'} … -m accel_train.train"
        others = ", and so on each host" if launch.world_size > launch.local_world_size else ""
        return f"{shlex.join(_launcher_words()) or unread} {recipe}{others}"
    if launch.launcher == "srun":
        return f"srun --ntasks={launch.world_size} … {program}"
    if launch.launcher == "pbsdsh":
        return f"pbsdsh … {program}"
    if launch.launcher == "environment":
        return f"{program}, with RANK, WORLD_SIZE and MASTER_ADDR set as before"
    return f"mpirun -n {launch.world_size} … {program}"


def _launcher_words() -> list[str]:
    """The launcher's command line up to our program's own arguments, or [] if it cannot be read."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    except OSError:  # not Linux, or the launcher has gone
        return []
    ours = sys.argv[1:]
    if not ours or words[-len(ours) :] != ours or not {Path(word).name for word in words} & LAUNCHERS:
        return []
    head = words[: -len(ours)] + ["train"] * (ours[0] == "train")  # of `-m accel_train train`
    if len(head) > 1 and Path(head[1]).name in LAUNCHERS:  # python …/bin/accelerate launch
        name = Path(head[1]).name
        head = [name if shutil.which(name) else head[1], *head[2:]]
    return head
