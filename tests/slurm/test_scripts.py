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
