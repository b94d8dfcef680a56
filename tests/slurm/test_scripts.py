"""The job scripts without a cluster: what they decide by themselves, and their style."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_stop_without_progress_is_requeued_three_times(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho scontrol $*\n")
    scontrol.chmod(0o755)
    run = tmp_path / "runs" / "digits" / "job-7"
    script = (
        f"source {ROOT}/slurm/common.sh; begin_run digits; mkdir -p $RUN/slurm; echo $UPDATE > $RUN/REQUEUE; end_run 0"
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "ACCEL_TRAIN_ROOT": str(ROOT)}
    outcomes = []
    for update in ("10", "20", "20", "20", "20", "30"):
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment | {"UPDATE": update}, capture_output=True, text=True
        )
        outcomes.append((done.returncode, "scontrol requeue 7" in done.stdout, "without progress" in done.stderr))
    assert outcomes == [(0, True, False)] * 4 + [(1, False, True)] + [(0, True, False)]
    assert (run / "slurm" / "requeues").read_text().split() == ["10", "20", "20", "20", "20", "30"]


def test_a_job_whose_run_another_one_owns_changes_and_obeys_nothing_of_its(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "slurm" / "job-7" / "nodes").mkdir(parents=True)
    others = [run / name for name in ("owner.json", "REQUEUE", "STOP", "slurm/job-7/exit-code", "slurm/job-7/nodes/n1")]
    for path in others:
        path.write_text("10\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho scontrol $*\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = f"source {ROOT}/slurm/common.sh; begin_run digits --output-dir {run}; echo 2 >$RUN/slurm/job-8/exit-code; "
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "8", "ACCEL_TRAIN_ROOT": str(ROOT)}
    # srun says 1 or 137 of a rank that was refused with 2
    done = subprocess.run(["bash", "-c", f"{script} end_run 1"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert b"scontrol requeue 8" not in done.stdout
    assert [path.read_text() for path in others] == ["10\n"] * 5


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    scripts = [
        *ROOT.glob("slurm/*.s*"),
        *ROOT.glob("slurm/sites/*.sh"),
        *ROOT.glob("pbs/*"),
        *ROOT.glob("tests/slurm/*.sh"),
    ]
    assert len(scripts) >= 9
    done = subprocess.run(
        ["shellcheck", "-x", "--exclude=SC1091", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
