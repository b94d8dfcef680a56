"""`accel-train submit` on a real Slurm: arrays, requeues of one element, a submission that is killed in between."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_slurm
import yaml
from test_slurm import PATH, Cluster, local_cluster

pytestmark = [*test_slurm.pytestmark, pytest.mark.slow]
OPTIONS = ("--", "--cpus-per-task=1", "--time=30", str(test_slurm.ROOT / "slurm" / "train.sbatch"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as started:
        yield started


def accel_train(cluster: Cluster, *words: str, code: int = 0, **variables: str) -> str:
    """Run `accel-train WORDS` in the cluster's folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "accel_train", *words], cwd=cluster.directory, capture_output=True, text=True,
        env=cluster.environment | variables,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def queued(cluster: Cluster, name: str = "%j") -> list[str]:
    """Return the numbers of all jobs that were ever submitted and whose names contain `name`."""
    lines = cluster.command("squeue", "--states=all", "--array", "--noheader", "--format=%i %j").splitlines()
    return [line.split()[0] for line in lines if name in line.split()[1]]


def jobs_of(cluster: Cluster, folder: Path) -> list[str]:
    return [number for path in folder.glob("jobs/*.jsonl") for number in queued(cluster, path.stem)]


def until(condition: Callable[[], object], folder: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(path.read_text() for path in folder.glob("jobs/*.log"))
        assert time.monotonic() < deadline, f"waited {seconds} s in vain; the logs say\n{logs}"
        time.sleep(0.3)


def update(run: Path) -> int:
    """Return the newest update in metrics.jsonl."""
    with contextlib.suppress(OSError):
        return max([int(n) for n in re.findall(r'"update": (\d+)', (run / "metrics.jsonl").read_text())] + [0])
    return 0


def table(text: str) -> dict[str, list[str]]:
    """Return the lines of `accel-train runs`, in words, by the name of the run's folder."""
    return {Path(line.split()[0]).name: line.split()[1:] for line in text.splitlines()[1:]}


def test_an_array_of_runs_each_requeued_by_itself(cluster: Cluster) -> None:
    """Two seeds, two settings: one element is warned and requeued, one is killed and submitted again."""
    folder = cluster.directory / "array"
    words = ("submit", "digits", "--epochs", "30", "--log-every-updates", "1", "--seeds", "0-1",
             "--over", "optim.lr=0.05,0.02", "--output-dir", "array", *OPTIONS)  # fmt: skip
    shown = accel_train(cluster, *words[: words.index("--")], "--print", *OPTIONS)
    assert "4 of 4 runs would be queued" in shown and "--array=0-3" in shown and "after-job" in shown
    assert not folder.exists()
    assert "4 runs queued as " in accel_train(cluster, *words)
    names = [f"optim.lr={lr}_seed={seed}" for lr in (0.05, 0.02) for seed in (0, 1)]
    runs = [folder / name for name in names]
    number = (next(folder.glob("jobs/*.id"))).read_text().strip()
    again = accel_train(cluster, *words)  # while they are in the queue
    assert "in the queue already" in again and "nothing to queue" in again and len(jobs_of(cluster, folder)) == 4

    until(lambda: all(update(run) >= 20 for run in runs), folder)
    # The last element has the number of the whole array, too. Only it may get the warning, and only it is requeued.
    last = cluster.command("squeue", "--array", "--noheader", f"--jobs={number}", "--format=%A %i").splitlines()
    assert f"{number} {number}_3" in last
    cluster.command("scancel", "--signal=USR1", f"{number}_3")
    until(lambda: (runs[3] / "slurm" / "requeues").exists(), folder)
    listed = table(accel_train(cluster, "runs", "array"))
    assert listed[names[3]][:3] == ["interrupted", "requeued", f"{number}_3"], listed
    # The operating system kills the first.
    killed = json.loads((runs[0] / "owner.json").read_text())
    assert killed["job"] == f"{number}_0"
    os.kill(killed["pid"], signal.SIGKILL)
    until(lambda: table(accel_train(cluster, "runs", "array"))[names[0]][:2] == ["stale", "failed"], folder)
    assert "1 run queued as" in accel_train(cluster, *words)
    assert len(jobs_of(cluster, folder)) == 5

    until(lambda: all((run / "result.json").exists() for run in runs), folder)
    for index, run in enumerate(runs):
        starts = json.loads((run / "starts.json").read_text())["starts"]
        assert len(starts) == 1 + (index in (0, 3)) and (len(starts) == 1 or starts[1]["first_update"] > 0)
        settings = yaml.safe_load((run / "config.yaml").read_text())
        assert (settings["optim"]["lr"], settings["seed"]) == ((0.05, 0.05, 0.02, 0.02)[index], index % 2)
    restarts = cluster.command("squeue", "--states=all", "--array", "--noheader", f"--jobs={number}",
                               "--Format=ArrayTaskID:10,RestartCnt:10").splitlines()  # fmt: skip
    assert dict(line.split() for line in restarts) == {"0": "0", "1": "0", "2": "0", "3": "1"}
    until(lambda: "running" not in accel_train(cluster, "runs", "array"), folder)
    listed = table(accel_train(cluster, "runs", "array"))
    assert {name: line[:2] for name, line in listed.items()} == {name: ["finished", "finished"] for name in names}
    assert "finished already: " in accel_train(cluster, *words) and len(jobs_of(cluster, folder)) == 5
    report = accel_train(cluster, "report", "array")
    lines = [re.split(" {2,}", line) for line in report.splitlines() if line.startswith("test accuracy")]
    means = lines[:2]  # the next one compares both settings
    assert [line[1:3] for line in means] == [["optim.lr=0.02", "2"], ["optim.lr=0.05", "2"]]
    assert (folder / "report.html").exists()
    # More seeds join; another setting of a run that exists is refused.
    more = accel_train(cluster, *words[: words.index("--")], "--seeds", "0-2", "--print", *OPTIONS)
    assert "2 of 6 runs would be queued" in more
    other = accel_train(cluster, *words[: words.index("--")], "--batch-size", "32", *OPTIONS, code=2)
    assert "is a run with other settings: batch-size (48 there, 32 here)" in other
    assert len(jobs_of(cluster, folder)) == 5


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_submission_that_is_killed(cluster: Cluster, moment: str) -> None:
    """Before or after Slurm has accepted it: the next call neither loses a run nor queues one twice."""
    folder = cluster.directory / f"killed-{moment}"
    (folder / "bin").mkdir(parents=True)
    real, end = shutil.which("sbatch", path=PATH), "kill -KILL $PPID; "
    sbatch = folder / "bin" / "sbatch"
    calls = f'{end * (moment == "before")}[[ "{moment}" == before ]] || {real} "$@"; {end * (moment == "after")}'
    sbatch.write_text(f"#!/bin/bash\n{calls}\n")
    sbatch.chmod(0o755)
    words = ("submit", "digits", "--epochs", "1", "--seeds", "0-1", "--output-dir", str(folder), *OPTIONS)
    accel_train(cluster, *words, code=-signal.SIGKILL, PATH=f"{sbatch.parent}:{PATH}")
    assert not [*folder.glob("jobs/*.id")] and len([*folder.glob("jobs/*.jsonl")]) == 1
    until(lambda: len(jobs_of(cluster, folder)) == 2 * (moment == "after"), folder, 10)
    assert set(table(accel_train(cluster, "runs", str(folder)))) == {"seed=0", "seed=1"}
    again = accel_train(cluster, *words)
    assert ("in the queue already" in again) == (moment == "after"), again
    assert len(jobs_of(cluster, folder)) == 2 and len([*folder.glob("jobs/*.id")]) == 1
    until(lambda: len([*folder.glob("*/result.json")]) == 2, folder)


def test_values_reach_a_run_as_they_were_given(cluster: Cluster) -> None:
    """Spaces, quotes, a comma and a dollar sign, in a folder whose name has some of them."""
    folder = cluster.directory / "it's 50% $HOME"
    values = ["a b", "it's $HOME", 'say "x"', "1,2"]
    over = "data.root=" + ",".join(value.replace(",", "\\,") for value in values)
    data = ["--data.name", "synthetic", "--data.channels", "1", "--model.image-size", "8"]  # reads nothing from there
    words = ("submit", "digits", *data, "--epochs", "1", "--over", over)
    accel_train(cluster, *words, "--output-dir", str(folder), *OPTIONS)
    until(lambda: len([*folder.glob("*/result.json")]) == 4, folder)
    roots = {yaml.safe_load(path.read_text())["data"]["root"] for path in folder.glob("*/config.yaml")}
    assert roots == {*values}


def test_what_slurm_or_the_program_refuses_queues_nothing(cluster: Cluster) -> None:
    before = queued(cluster, "")
    words = ("submit", "digits", "--seeds", "0-1", "--output-dir", "refused")
    wrong = accel_train(cluster, *words, "--over", "optim.lr=0.1,fast", *OPTIONS, code=2)
    assert wrong == "accel-train: error: --optim.lr: expected a number, found 'fast' (--over).\n"
    assert not (cluster.directory / "refused").exists()
    slurm = accel_train(cluster, *words, *OPTIONS[:-1], "--partition=nowhere", OPTIONS[-1], code=2)
    assert slurm.count("\n") == 1 and "sbatch has failed (exit code 1); it says:" in slurm and "partition" in slurm
    assert {*queued(cluster, "")} <= {*before}  # of other tests' jobs some may have ended meanwhile
    accel_train(cluster, *words, *OPTIONS[:-1], "--hold", OPTIONS[-1])  # as it should be
    listed = table(accel_train(cluster, "runs", "refused"))
    assert {line[0] + line[1] + line[2] for line in listed.values()} == {"notbegunqueued"}
    cluster.command("scancel", next(cluster.directory.glob("refused/jobs/*.id")).read_text().strip())
    # Without the scheduler's answer nothing is known of them.
    squeue = cluster.directory / "silent" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\nexec sleep 60\n")
    squeue.chmod(0o755)
    shown = accel_train(cluster, "runs", "refused", PATH=f"{squeue.parent}:{PATH}")
    assert "without the states of jobs: squeue has not answered within 10 s" in shown
    assert "job" not in shown.splitlines()[0].split() and set(table(shown)) >= {"seed=0", "seed=1"}
    squeue.write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    silent = accel_train(cluster, *words, *OPTIONS, code=2, PATH=f"{squeue.parent}:{PATH}")
    assert silent.count("\n") == 1 and "Unable to contact slurm controller. Nothing was queued" in silent
