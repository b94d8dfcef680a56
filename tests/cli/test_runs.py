"""`accel-train runs`: what it says of runs in each state. It only reads."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from test_dispatch import PROGRAM, accel_train

from accel_train.ownership.owner import FILE, STALE_SECONDS, Owner, write_private

DEAD = """
import sys
from pathlib import Path
from accel_train.ownership.owner import FILE, Owner, write_private
write_private(Path(sys.argv[1]), Owner.of_this_process()).rename(Path(sys.argv[1], FILE))
"""


def own(run: Path, owner: Owner) -> None:
    write_private(run, owner).rename(run / FILE)


def state_of(run: Path, state: str, **values: Any) -> None:
    """Make the finished run one that has not ended: with this state in its status, and without a result."""
    (run / "result.json").unlink()
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": state, **values}))


def test_it_lists_each_run_with_its_state(digits_run: Path, tmp_path: Path) -> None:
    here = Owner.of_this_process()
    elsewhere = dataclasses.replace(here, machine="another", host="node7", pid=4711, job="99")
    names = ("finished", "interrupted", "failed", "running", "dead", "silent", "remote", "new")
    for name in names:
        shutil.copytree(digits_run, tmp_path / "runs" / "digits" / name)
        (tmp_path / "runs" / "digits" / name / FILE).unlink(missing_ok=True)
    top = tmp_path / "runs" / "digits"
    state_of(top / "interrupted", "interrupted", time=time.time() - 3 * 86400)
    state_of(top / "failed", "failed", reason="hung")
    for name in ("dead", "silent", "remote"):
        state_of(top / name, "training", epoch=1)
    state_of(top / "running", "training", epoch=1, epochs=2.5, val_accuracy=0.625)
    own(top / "running", here)
    subprocess.run([sys.executable, "-c", DEAD, str(top / "dead")], check=True)
    own(top / "remote", elsewhere)
    own(top / "silent", elsewhere)
    long_ago = time.time() - STALE_SECONDS - 60
    os.utime(top / "silent" / FILE, (long_ago, long_ago))
    state_of(top / "new", "")
    (top / "new" / "status.json").unlink()  # it has just begun
    own(top / "new", here)
    before = {path: path.stat().st_mtime_ns for path in top.rglob("*")}

    code, out, err = accel_train("runs", str(tmp_path / "runs"), program=("-c", PROGRAM), PATH="")  # no squeue
    assert (code, err) == (0, "")
    head, *lines, last = out.splitlines()
    assert json.loads(last) == [0, []]  # without torch
    assert head.split() == ["run", "state", "epoch", "accuracy", "age", "owner"]
    found = {Path(line.split()[0]).name: line.split()[1:] for line in lines}
    assert {name: words[0] for name, words in found.items()} == {
        "finished": "finished",
        "interrupted": "interrupted",
        "failed": "failed",
        "running": "running",
        "dead": "stale",
        "silent": "stale",
        "remote": "running",
        "new": "running",
    }
    test = json.loads((digits_run / "result.json").read_text())["test_accuracy"]
    assert found["finished"][2:4] == ["test", f"{test:.2%}"]
    assert found["running"][1:4] == ["1/3", "val", "62.50%"]
    assert found["running"][-2:] == [here.host, str(here.pid)]
    assert found["remote"][-4:] == ["node7", "4711,", "job", "99"]
    assert found["interrupted"][-2:] == ["3", "days"]
    assert lines[-1].split()[0].endswith("/interrupted")  # the oldest
    assert {path: path.stat().st_mtime_ns for path in top.rglob("*")} == before


def test_several_labels_are_listed_by_their_mean_average_precision(digits_run: Path, tmp_path: Path) -> None:
    for name in ("finished", "trains"):
        shutil.copytree(digits_run, tmp_path / name)
        status = json.loads((tmp_path / name / "status.json").read_text())
        (tmp_path / name / "status.json").write_text(json.dumps(status | {"val_accuracy": None, "val_map": 0.5}))
    result = json.loads((tmp_path / "finished" / "result.json").read_text())
    others = {key: value for key, value in result.items() if not key.endswith("accuracy")}
    (tmp_path / "finished" / "result.json").write_text(json.dumps(others | {"test_map": 0.75}))
    state_of(tmp_path / "trains", "training", epoch=1)
    code, out, _ = accel_train("runs", str(tmp_path))
    shown = {Path(line.split()[0]).name: " ".join(line.split()[3:6]) for line in out.splitlines()[1:]}
    assert code == 0 and shown == {"finished": "test map 75.00%", "trains": "val map 50.00%"}


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert accel_train("runs", str(tmp_path)) == (0, f"There are no runs in {tmp_path}.\n", "")
    missing = tmp_path / "none"
    error = f"accel-train: error: {missing}: no such folder; give the one in which the runs are.\n"
    assert accel_train("runs", str(missing)) == (2, "", error)
