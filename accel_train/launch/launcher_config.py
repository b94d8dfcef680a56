"""Accelerate's config file, for processes that `accelerate launch` has not started.

Under `srun python`, or alone in a job, nobody reads the file to which ACCELERATE_CONFIG points. So the process reads it
itself, with the functions of Accelerate's launcher, and sets the variables that the launcher would set: precision,
torch.compile, FSDP. A file that asks for more is refused.
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

NEED_LAUNCHER = ("use_deepspeed", "use_megatron_lm", "tpu")


def apply_launcher_config(launch: Launch) -> None:
    """Set the variables that `accelerate launch --config_file` would set, if ACCEL_TRAIN_LAUNCHER_CONFIG names a file.

    Raises UserError if Accelerate cannot read the file, or if the file needs Accelerate's launcher.
    """
    file = os.environ.get(VARIABLE, "")
    if file:
        os.environ.update(variables(file, launch))


def variables(file: str, launch: Launch) -> Mapping[str, str]:
    """The variables for Accelerate and its plugins that a launcher with this config file would set.

    Accelerate's launcher has no public function for this. `_validate_launch_command` and `prepare_multi_gpu_env` are
    its internals, checked with accelerate 1.15.0; tests/launch/test_launcher_config.py compares the result with what
    `accelerate launch` really sets. Raises UserError.
    """
    if not Path(file).is_file():
        raise UserError(f"{VARIABLE} is {file}, but there is no such file. Give the path of a file, or unset it.")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    world = ["--num_processes", str(launch.world_size), "--num_machines", "1", "--machine_rank", "0"]
    line = ["--config_file", file, "--gpu_ids", "all", "--main_process_port", "0", *world, "script"]
    try:
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(line))
        unsupported = [name for name in NEED_LAUNCHER if getattr(arguments, name)]
        if unsupported:
            raise ValueError(f"{unsupported[0].removeprefix('use_')} is not possible without accelerate's launcher")
        set_by_launcher = prepare_multi_gpu_env(arguments)
    # Accelerate raises all of these for a file that it does not understand.
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"accelerate cannot use the config file {file}: {reason}") from None
    environment = {
        name: value
        for name, value in set_by_launcher.items()
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) and os.environ.get(name) != value
    }
    if getattr(arguments, "use_cpu", False):
        environment["ACCELERATE_USE_CPU"] = "true"
    if arguments.use_fsdp and launch.world_size == 1:
        # Accelerate uses FSDP only if there is a process group, even for a single process
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.main_process_port)}
    return environment
