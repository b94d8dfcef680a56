"""pbs/train.pbs with the variables and files that PBS sets; its commands are stood in for by small scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_launch

ROOT = Path(__file__).parents[1]
COMMANDS = {
    # like the real one: another environment, the n-th line of the node file
    "pbsdsh": 'shift; index=$1; shift 2; echo "pbsdsh $index" >>"$LOG"\n'
    'exec env -i HOME="$HOME" PATH=/usr/bin:/bin LOG="$LOG" PBS_JOBID="$PBS_JOBID" PBS_NODENUM="$index" "$@"',
    "qstat": 'echo "Job Id: $2"; echo "    Resource_List.walltime = ${WALLTIME:-01:00:00}"',
    "qsub": 'echo "qsub $* TRAIN=$TRAIN" >>"$LOG"',
}


def train(directory: Path, *, walltime: str = "01:00:00", **variables: str) -> "subprocess.CompletedProcess[str]":
    commands = directory / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    (directory / "nodes").write_text("127.0.0.1\n127.0.0.1\nlocalhost\nlocalhost\n")
    environment = test_launch.environment(
        PBS_JOBID="123.server", PBS_NODEFILE=str(directory / "nodes"), PBS_O_WORKDIR=str(directory),
        ACCEL_TRAIN_ROOT=str(ROOT), ACCEL_TRAIN_SITE=str(directory / "none"), PROCESSES_PER_NODE="1",
        ACCELERATE_CONFIG=str(ROOT / "accelerate_configs" / "multi_cpu.yaml"), ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1", LOG=str(directory / "log"), WALLTIME=walltime, **variables,
    )  # fmt: skip
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.run(
        ["bash", str(ROOT / "pbs" / "train.pbs")], env=environment | {"PATH": path}, cwd=directory,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.slow
def test_one_launcher_a_node_and_again_after_the_time_limit(tmp_path: Path) -> None:
    # the time limit is so near that STOP is laid while the program starts: the first update obeys it
    first = train(tmp_path, TRAIN="digits --epochs 2", walltime="00:00:12", LEAD_SECONDS="11")
    run = tmp_path / "runs" / "digits" / "job-123.server"
    log = (tmp_path / "log").read_text().splitlines()
    assert first.returncode == 0, first.stdout + first.stderr
    assert sorted(log[:2]) == ["pbsdsh 0", "pbsdsh 2"]
    assert log[2].startswith("qsub -v TRAIN,CONTINUE,") and log[2].endswith("pbs/train.pbs TRAIN=digits --epochs 2")
    assert not (run / "result.json").exists()
    # what qsub starts
    second = train(tmp_path, TRAIN="digits --epochs 2", CONTINUE=str(run))
    assert second.returncode == 0, second.stdout + second.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["updates"]) == (2, 60)
    assert "going on after update" in second.stdout
    # each rank's own log, of both starts
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    assert "Stopped by the file STOP" in logs["rank-0.log"] and "going on after update" in logs["rank-0.log"]
    assert logs["rank-1.log"].count("rank 1 on ") == 2
    # once more: nothing is left to do
    assert f"{run} holds a finished run" in train(tmp_path, TRAIN="digits --epochs 2", CONTINUE=str(run)).stdout


def test_the_exit_code_is_the_trainers_and_a_short_walltime_is_refused(tmp_path: Path) -> None:
    wrong = train(tmp_path, TRAIN="digits --epochs nonsense")
    assert wrong.returncode == 2, wrong.stdout + wrong.stderr
    assert "failed with exit code 2" in wrong.stderr
    short = train(tmp_path, TRAIN="digits", walltime="00:01:00")
    assert short.returncode == 2 and "a walltime of 60 s is over before STOP would be laid" in short.stderr
