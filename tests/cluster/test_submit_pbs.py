"""`accel-train submit` on a real PBS, where one is installed: an array whose elements continue as jobs of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import helpers
import pytest

ROOT = helpers.ROOT


def answers() -> bool:
    return bool(shutil.which("qstat")) and subprocess.run(["qstat", "-B"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not answers(), reason="no PBS answers here (qstat -B)"),
]


def accel_train(folder: Path, *words: str) -> str:
    environment = os.environ | {"DOCTOR": "off", "PROCESSES_PER_NODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "accel_train", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def table(folder: Path) -> dict[str, list[str]]:
    """Return the lines of `accel-train runs`, in words, by the name of the run's folder."""
    lines = [line.removeprefix("a b/").split() for line in accel_train(folder, "runs", "a b").splitlines()[1:]]
    return {name: words for name, *words in lines}


def test_an_array_of_which_one_run_is_stopped_and_continues(tmp_path: Path) -> None:
    """It saves, and its continuation is a job of its own, in its own directory and with its own settings."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    python, qstat = Path(sys.executable).parent, Path(str(shutil.which("qstat"))).parent
    site = (
        f"export PATH={python}:{qstat}:$PATH PYTHONPATH={ROOT} ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1\n"
        f"export PBS_CONF_FILE={os.environ.get('PBS_CONF_FILE', '/etc/pbs.conf')}\n"
    )
    text = (ROOT / "pbs" / "train.pbs").read_text()
    (tmp_path / "my.pbs").write_text(text.replace("# End of ENVIRONMENT", f"{site}# End of ENVIRONMENT"))
    (tmp_path / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    words = [
        "submit",
        "digits",
        "--scheduler",
        "pbs",
        "--epochs",
        "40",
        "--log-every-updates",
        "1",
        "--seeds",
        "3,4",
        "--output-dir",
        "a b",
    ]
    asked = ["--", "-l", "select=1:ncpus=1:mpiprocs=1", "-l", "walltime=600", "-v", "DOCTOR,PROCESSES_PER_NODE",
             "my.pbs"]  # fmt: skip
    assert "2 runs queued as " in accel_train(tmp_path, *words, *asked)
    assert "in the queue already: seed=3 (" in accel_train(tmp_path, *words, *asked)
    folder = tmp_path / "a b"
    (path,) = folder.glob("jobs/*.id")
    number = path.read_text().strip()
    assert "[]" in number
    runs = [folder / "seed=3", folder / "seed=4"]

    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            logs = "\n".join(log.read_text() for log in folder.glob("jobs/*.OU"))
            assert time.monotonic() < deadline, logs
            time.sleep(0.5)

    until(
        lambda: all((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 2000 for run in runs)
    )
    listed = table(tmp_path)
    assert listed["seed=3"][:3] == ["running", "running", number.replace("[]", "[0]")], listed
    (runs[0] / "STOP").touch()  # as the script does before the time limit
    until(lambda: "[" not in (runs[0] / "slurm" / "job").read_text())
    assert "in the queue already: seed=3 (" in accel_train(tmp_path, *words, *asked)
    until(lambda: all((run / "result.json").exists() for run in runs))
    until(lambda: "running" not in str(table(tmp_path)))
    listed = table(tmp_path)
    assert [listed[run.name][:2] for run in runs] == [["finished", "finished"]] * 2
    assert listed["seed=3"][2] == (runs[0] / "slurm" / "job").read_text().strip() != number
    assert listed["seed=4"][2] == number.replace("[]", "[1]")
    for index, run in enumerate(runs):
        assert json.loads((run / "result.json").read_text())["epochs"] == 40
        assert f"seed: {index + 3}\n" in (run / "config.yaml").read_text()
        assert len(json.loads((run / "starts.json").read_text())["starts"]) == 1 + (index == 0)
    again = accel_train(tmp_path, *words, *asked)
    assert "finished already: seed=3, seed=4" in again and "nothing to queue" in again
