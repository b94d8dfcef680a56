"""The command that resumes a run in the way in which it was started: directly, by a launcher or in a job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from accel_train.launch.environment import Launch
from accel_train.launch.parent import LAUNCHERS, launcher_command
from accel_train.records.summary import typed_program


def resume_command(launch: Launch, run: Path, *options: str) -> str:
    """What a person types to resume the run in the directory `run`, which was launched as `launch` says.

    `options`: words of settings that differ from the run's own.
    """
    recipe = shlex.join([f"{run}/config.yaml", "--output-dir", str(run), *options])
    program = f"python -m accel_train.train {recipe}"
    if {"RUN", "ACCEL_TRAIN_ROOT"} <= os.environ.keys():  # slurm/common.sh sets them for all programs that it starts
        if "PBS_JOBID" in os.environ:
            option = "-V" if "'" in recipe else "-v TRAIN"  # qsub -v turns quotes into backslashes
            return f"TRAIN={shlex.quote(recipe)} qsub {option} … pbs/train.pbs"
        return f"sbatch … slurm/NAME.sbatch {recipe}"
    if launch.launcher == "none":
        return f"{typed_program()} train {recipe}"
    if launch.launcher in ("accelerate", "torchrun"):
        unknown = f"{'accelerate launch' if launch.launcher == 'accelerate' else 'torchrun'} … -m accel_train.train"
        others = ", and so on each host" if launch.world_size > launch.local_world_size else ""
        return f"{shlex.join(_launcher_words()) or unknown} {recipe}{others}"
    if launch.launcher == "srun":
        return f"srun --ntasks={launch.world_size} … {program}"
    if launch.launcher == "pbsdsh":
        return f"pbsdsh … {program}"
    if launch.launcher == "environment":
        return f"{program}, with RANK, WORLD_SIZE and MASTER_ADDR set as before"
    return f"mpirun -n {launch.world_size} … {program}"


def _launcher_words() -> list[str]:
    """The launcher's command line up to this program's own arguments, or [] if it cannot be read."""
    words, ours = launcher_command(), sys.argv[1:]
    if not ours or words[-len(ours) :] != ours:
        return []
    head = words[: -len(ours)] + ["train"] * (ours[0] == "train")  # of `-m accel_train train`
    if len(head) > 1 and Path(head[1]).name in LAUNCHERS:  # python …/bin/accelerate launch
        name = Path(head[1]).name
        head = [name if shutil.which(name) else head[1], *head[2:]]
    return head
