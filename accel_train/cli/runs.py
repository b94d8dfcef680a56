"""`accel-train runs`."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accel_train.cli.table import print_table
from accel_train.config.declaration import Word
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import MAX_BYTES
from accel_train.errors import UserError, print_line
from accel_train.ownership.generation import read_result
from accel_train.ownership.owner import FILE, age_text, read_owner
from accel_train.tools.cluster.scheduler import LOOK_SECONDS, answers, states_of
from accel_train.tools.cluster.submission import LISTS, RECIPE, is_job, job_of_run, jobs_of_folder, newest
from accel_train.untrusted import is_number, read_json_lines, read_json_object, read_regular_file

EPOCHS = re.compile(rb"^epochs: ([0-9]{1,9}(?:\.[0-9]+)?)\s*$", re.MULTILINE)
"""In a config.yaml as `schema.to_yaml` writes it."""


@dataclass(frozen=True)
class Runs(CommandOptions):
    """List the runs in a folder and its subfolders, the most recently updated first. Changes nothing.

    A run is "running", "finished", "interrupted" (saved; the same command continues it), "failed", or "stale": its
    process died, or has given no sign of life for two minutes. The next start takes over a stale run. "job" is the
    state of a run's job in Slurm or PBS; "forgotten": it has ended, some time ago. Runs of `accel-train submit` are
    listed before they have begun.
    """

    dir: Annotated[Path, Word("[DIR]")] = Path("runs")
    """The folder to look in."""

    def mistakes(self) -> list[str]:
        if self.dir.is_dir() or self.dir == Path("runs"):  # the default exists from the first run on
            return []
        return [f"{self.dir}: no such folder; give the one in which the runs are."]


def runs(arguments: Sequence[str]) -> int:
    """Run `accel-train runs`; return the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `runs | head` ends quietly
    options, _ = parse_command(Runs, arguments)
    found = sorted(_read_runs(options.dir), key=lambda run: run.changed, reverse=True)
    if not found:
        print_line(f"There are no runs in {options.dir.absolute()}.")
        return 0
    head = ["run", "state", "epoch", "accuracy", "age", "owner"]
    rows = [[str(run.path), run.state, run.epoch, run.accuracy, _age(run.changed), run.owner] for run in found]
    if states := _job_states(found):
        head.insert(2, "job")
        for row, state in zip(rows, states, strict=True):
            row.insert(2, state)
    print_table(head, rows, numbers=("epoch", "accuracy", "age"))
    return 0


@dataclass(frozen=True)
class Run:
    """A line of the list."""

    path: Path
    state: str
    epoch: str
    accuracy: str
    changed: float
    """When its status was written last, in seconds since 1970."""
    owner: str
    job: str = ""
    """That of the owner, as its batch system names it."""


def _job_states(found: Sequence[Run]) -> list[str]:
    """Return the state of each run's job, with its number; [] without a scheduler, or if no run has a job."""
    try:
        submitted = {folder: jobs_of_folder(folder) for folder in {run.path.parent for run in found}}
        jobs = [
            [*submitted[run.path.parent].get(run.path.name, ()), *job_of_run(run.path), *filter(is_job, [run.job])]
            for run in found
        ]
        states = states_of((job for numbers in jobs for job in numbers), LOOK_SECONDS)
    except (UserError, OSError) as error:
        print_line(f"accel-train runs: without the states of jobs: {error}", sys.stderr)
        return []
    known = [newest(numbers, states) for numbers in jobs]
    for place, (run, numbers) in enumerate(zip(found, jobs, strict=True)):
        if numbers and not known[place][1] and run.state != "finished" and answers(numbers[-1]):
            known[place] = (numbers[-1], "forgotten")
    return [f"{state} {job}".strip() for job, state in known] if any(state for _, state in known) else []


def _read_runs(top: Path) -> Iterator[Run]:
    for folder in run_folders(top):
        with contextlib.suppress(FileNotFoundError):  # somebody deletes it
            yield _read_run(folder)


def run_folders(top: Path) -> Iterator[Path]:
    """Return the folders of runs, which have a config.yaml and a status.json or an owner; or a recipe, beside lists of
    submitted runs. No run is inside of a run."""
    for folder, folders, files in os.walk(top):
        submitted = RECIPE in files and any(Path(folder).with_name(LISTS).glob("*.jsonl"))
        if submitted or ("config.yaml" in files and ("status.json" in files or FILE in files)):
            folders.clear()
            yield Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _read_run(path: Path) -> Run:
    status, result = read_json_object(path / "status.json"), read_result(path)
    changed, has_begun = status.get("time", math.nan), (path / "config.yaml").exists()
    if not is_number(changed):
        changed = (path / ("config.yaml" if has_begun else RECIPE)).stat().st_mtime
    lives, owner, job = _owner(path)
    state = status.get("state")
    if lives:
        state = "running"
    elif not has_begun:
        state = "not begun"
    elif state not in ("finished", "interrupted", "failed"):  # it ended without a word
        state = "stale"
    epoch = _epoch(path, status) if has_begun else ""
    return Run(path, str(state), epoch, _accuracy(path, result), changed, owner, job)


def _owner(run: Path) -> tuple[bool, str, str]:
    """Return (whether the owner is alive, who it is, its job); (False, "", "") without an owner."""
    try:
        seen = read_owner(run / FILE)
    except OSError:
        return False, "", ""
    if seen.owner is None:
        return seen.seems_alive(), "unknown", ""
    job = f", job {seen.owner.job}" if seen.owner.job else ""
    return seen.seems_alive(), f"{seen.owner.host} {seen.owner.pid}{job}", seen.owner.job


def _epoch(run: Path, status: Mapping[str, Any]) -> str:
    try:
        text = read_regular_file(run / "config.yaml", MAX_BYTES, follow=True)
    except OSError:
        text = b""
    epochs = EPOCHS.search(text)  # reading the whole YAML of many runs would take long
    return f"{status.get('epoch', '?')}/{math.ceil(float(epochs[1])) if epochs else '?'}"


def _accuracy(run: Path, result: Mapping[str, Any]) -> str:
    """Return the newest accuracy on the test split; else the best one on the validation split; else "".

    If images have several labels, the mean average precision stands for it.
    """
    for name, shown in (("accuracy", ""), ("map", "map ")):
        test, best = result.get(f"test_{name}"), result.get(f"best_val_{name}")
        if isinstance(test, (int, float)):
            return f"test {shown}{test:.2%}"
        if best is None:  # not ended, or another metric decides what is best
            best = max(_evaluations(run, name), default=None)
        if isinstance(best, (int, float)):
            return f"val {shown}{best:.2%}"
    return ""


def _evaluations(run: Path, name: str) -> list[float]:
    """Return the figure `name` of all evaluations of the validation split in metrics.jsonl whose loss is finite."""
    try:
        lines = [line for line in read_json_lines(run / "metrics.jsonl", "eval") if line.get("split") == "val"]
    except OSError:
        return []
    finite = [line for line in lines if line.get("loss", 0.0) is not None]  # JSON has null for the others
    return [line[name] for line in finite if isinstance(line.get(name), (int, float))]


def _age(changed: float) -> str:
    seconds = max(0.0, time.time() - changed)
    return age_text(seconds) if seconds < 172800 else f"{seconds / 86400:.0f} days"
