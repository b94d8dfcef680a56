"""accelerate's config file, for processes that `accelerate launch` has not started.

Under `srun python`, or alone in a job, nobody reads the file to which ACCELERATE_CONFIG points. So the process does so
itself, with what accelerate's launcher reads it with, and sets the variables that the launcher would set: precision,
torch.compile, FSDP. What it cannot make of the file it refuses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from accel_train.errors import UserError
from accel_train.launch.environment import Launch

VARIABLE = "ACCEL_TRAIN_LAUNCHER_CONFIG"
"""The file's name. slurm/common.sh sets it for processes without a launcher."""

LAUNCHED_OTHERWISE = ("use_deepspeed", "use_megatron_lm", "tpu")


def apply_launcher_config(launch: Launch) -> None:
    """Set what `accelerate launch --config_file` would, if ACCEL_TRAIN_LAUNCHER_CONFIG names a file.

    Raises UserError if accelerate cannot read it, or if it asks for what needs accelerate's launcher.
    """
    file = os.environ.get(VARIABLE, "")
    if file:
        os.environ.update(variables(file, launch))


def variables(file: str, launch: Launch) -> Mapping[str, str]:
    """The variables for Accelerate and its plugins that a launcher with this config file would set."""
    if not Path(file).is_file():
        raise UserError(f"{VARIABLE} is {file}, but there is no such file.")
    # accelerate's launcher has no public function for this; tests/test_launcher_config.py holds this to what it does
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    world = ["--num_processes", str(launch.world_size), "--num_machines", "1", "--machine_rank", "0"]
    line = ["--config_file", file, "--gpu_ids", "all", "--main_process_port", "0", *world, "script"]
    try:
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(line))
        unfit = [name for name in LAUNCHED_OTHERWISE if getattr(arguments, name)]
        if unfit:
            raise ValueError(f"{unfit[0].removeprefix('use_')} is not possible without accelerate's launcher")
        set_by_launcher = prepare_multi_gpu_env(arguments)
    # of a file that it does not understand
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"accelerate cannot use the config file {file}: {reason}") from None
    found = {
        name: value
        for name, value in set_by_launcher.items()
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) and os.environ.get(name) != value
    }
    if getattr(arguments, "use_cpu", False):
        found["ACCELERATE_USE_CPU"] = "true"
    if arguments.use_fsdp and launch.world_size == 1:
        # Accelerate leaves FSDP out where there is no process group, be it of one
        found |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.main_process_port)}
    return found
