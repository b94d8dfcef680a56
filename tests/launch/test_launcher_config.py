"""Without a launcher, a process reads accelerate's config file as `accelerate launch` would."""

import os
from pathlib import Path

import helpers
import pytest
import worlds

from accel_train.errors import UserError
from accel_train.launch.accelerator import LAUNCHER_CONFIG, launcher_variables
from accel_train.launch.environment import Launch

CONFIGS = helpers.ROOT / "accelerate_configs"
COMPILED = """
distributed_type: MULTI_GPU
mixed_precision: 'bf16'  # in single quotes
dynamo_config: {dynamo_backend: EAGER, dynamo_mode: reduce-overhead}
"""
PREFIXES = ("ACCELERATE_MIXED", "ACCELERATE_DYNAMO", "ACCELERATE_USE_FSDP", "FSDP_")


@pytest.mark.parametrize("name", ["fsdp2", "compiled"])
def test_it_sets_what_accelerate_launch_sets(name: str, tmp_path: Path) -> None:
    file = CONFIGS / f"{name}.yaml"
    if name == "compiled":
        file = tmp_path / "compiled.yaml"
        file.write_text(COMPILED)
    line = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2"]
    launcher = helpers.Captured(
        [*line, "--main_process_port", "0", "--no_python", "env"], worlds.environment(OMP_NUM_THREADS="1")
    )
    out, err = launcher.communicate()
    assert launcher.returncode == 0, err
    launched = {line for line in out.splitlines() if line.startswith(PREFIXES)}
    found = launcher_variables(str(file), Launch("srun", 0, 2, 0, 2))
    assert {f"{name}={value}" for name, value in found.items() if name.startswith(PREFIXES)} == launched
    assert ("ACCELERATE_USE_FSDP=true" in launched) == (name == "fsdp2")
    assert ("ACCELERATE_DYNAMO_BACKEND=EAGER" in launched) == (name == "compiled")


def test_ranks_without_a_launcher_use_it(tmp_path: Path) -> None:
    file = tmp_path / "compiled.yaml"
    file.write_text(COMPILED)
    step = {"SLURM_JOB_ID": helpers.free_port(), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", LAUNCHER_CONFIG: str(file), "OMP_NUM_THREADS": "1"}
    step["ACCELERATE_USE_CPU"] = "true"  # the file asks for GPUs
    ranks = [
        helpers.Captured([worlds.PROGRAM], worlds.environment(SLURM_PROCID=str(n), SLURM_LOCALID=str(n), **step))
        for n in range(2)
    ]
    codes, seen, text = worlds.finish(*ranks)
    assert codes == [0, 0], text
    found = [(world["launcher"], world["sum"], world["precision"], world["dynamo"]) for world in seen]
    assert found == [("srun", 2, "bf16", "EAGER")] * 2


def test_a_single_process_is_a_group_of_one_under_fsdp() -> None:
    found = launcher_variables(str(CONFIGS / "fsdp2.yaml"), Launch())
    assert (found["RANK"], found["WORLD_SIZE"], found["FSDP_VERSION"]) == ("0", "1", "2")
    assert "RANK" not in launcher_variables(str(CONFIGS / "single_gpu.yaml"), Launch())
    assert launcher_variables(str(CONFIGS / "cpu.yaml"), Launch())["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}", "deepspeed is not possible without"),
        ("distributed_type: MEGATRON_LM", "megatron_lm is not possible without"),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf8", "Unknown mixed_precision mode: bf8"),
        ("distributed_type: MULTI_GPU\nprecision: bf16", r"unknown keys \(\['precision'\]\)"),
        ("distributed_type: [", "parsing"),
        (None, "no such file"),
    ],
)
def test_what_it_cannot_use_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    before = dict(os.environ)
    with pytest.raises(UserError, match=message) as caught:
        launcher_variables(str(file), Launch())
    assert "\n" not in str(caught.value) and os.environ == before
