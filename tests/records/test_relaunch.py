"""The command that continues a run, for each way of starting it; test_stopping.py tests a real launcher's."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from accel_train.launch.environment import Launch, at_terminal
from accel_train.records.summary import resume_command

RECIPE = "runs/a/config.yaml --output-dir runs/a"
JOB = {"ACCEL_TRAIN_START": "/src/runs/starts/7/now"}


@pytest.mark.parametrize(
    ("launch", "variables", "expected"),
    [
        (Launch(), {}, f"train {RECIPE}"),
        (Launch("accelerate", 0, 2, 0, 2), {}, f"accelerate launch … -m accel_train.train {RECIPE}"),
        (Launch("torchrun", 0, 4, 0, 2), {}, f"torchrun … -m accel_train.train {RECIPE}, and so on each host"),
        (Launch("srun", 0, 4, 0, 2), {}, f"srun --ntasks=4 … python -m accel_train.train {RECIPE}"),
        (Launch("Open MPI", 0, 4, 0, 2), {}, f"mpirun -n 4 … python -m accel_train.train {RECIPE}"),
        (Launch("srun", 0, 4, 0, 2), {**JOB, "SLURM_JOB_ID": "7"}, f"sbatch … slurm/train.sbatch {RECIPE}"),
        (Launch(), {**JOB, "PBS_JOBID": "7"}, f"TRAIN='{RECIPE}' qsub -v TRAIN … pbs/train.pbs"),
    ],
)
def test_each_launcher(
    launch: Launch, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCEL_TRAIN_START", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resume_command(launch, Path("runs/a")).endswith(expected)


def test_a_path_with_spaces_can_be_typed() -> None:
    words = shlex.split(resume_command(Launch(), Path("my runs/a")))
    assert words[-3:] == ["my runs/a/config.yaml", "--output-dir", "my runs/a"]


@pytest.mark.parametrize("variable", ["RANK", "ACCELERATE_MIXED_PRECISION", "SLURM_JOB_ID", "PBS_JOBID", "PMI_RANK"])
def test_a_job_or_a_launcher_is_no_person_at_a_terminal(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "ACCELERATE_MIXED_PRECISION", "SLURM_JOB_ID", "PBS_JOBID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 2)
    assert at_terminal()
    monkeypatch.setenv(variable, "0")
    assert not at_terminal()
