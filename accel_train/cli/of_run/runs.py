"""`accel-train runs`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import MAX_BYTES
from accel_train.errors import print_line
from accel_train.ownership.generation import read_result
from accel_train.ownership.owner import FILE, age_text, read_owner
from accel_train.records.table import print_table
from accel_train.untrusted import read_json_lines, read_json_object, read_regular_file


@dataclass(frozen=True)
class Runs(CommandOptions):
    """List the runs in a folder and its subfolders, the most recently updated first. Changes nothing.

    A run is "running", "finished", "interrupted" (saved; the same command continues it), "failed", or "stale": its
    process died, or has given no sign of life for two minutes. The next start takes over a stale run.
    """

    dir: Annotated[Positional[Path], arg(metavar="[DIR]")] = Path("runs")
    """The folder to look in."""

    def mistakes(self) -> list[str]:
        if self.dir.is_dir() or self.dir == Path("runs"):  # the default exists from the first run on
            return []
        return [f"{self.dir}: no such folder; give the one in which the runs are."]


def runs(arguments: Sequence[str]) -> int:
    """Run `accel-train runs`; return the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `runs | head` ends quietly
    options, _ = parse_command(Runs, arguments, "accel-train runs", positional=())
    found = sorted(_read_runs(options.dir), key=lambda run: run.changed, reverse=True)
    if not found:
        print_line(f"There are no runs in {options.dir}.")
        return 0
    print_table(
        ["run", "state", "epoch", "accuracy", "age", "owner"],
        [[str(run.path), run.state, run.epoch, run.accuracy, _age(run.changed), run.owner] for run in found],
        numbers=("epoch", "accuracy", "age"),
    )
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


def _read_runs(top: Path) -> Iterator[Run]:
    for folder in _run_folders(top):
        with contextlib.suppress(FileNotFoundError):  # somebody deletes it
            yield _read_run(folder)


def _run_folders(top: Path) -> Iterator[Path]:
    """Return the folders of runs, which have a config.yaml and a status.json or an owner. No run is inside of a run."""
    for folder, folders, files in os.walk(top):
        if "config.yaml" in files and ("status.json" in files or FILE in files):
            folders.clear()
            yield Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _read_run(path: Path) -> Run:
    status, result = read_json_object(path / "status.json"), read_result(path)
    changed = status.get("time")
    if not isinstance(changed, (int, float)):
        changed = (path / "config.yaml").stat().st_mtime
    lives, owner = _owner(path)
    state = status.get("state")
    if lives:
        state = "running"
    elif state not in ("finished", "interrupted", "failed"):  # it ended without a word
        state = "stale"
    return Run(path, str(state), _epoch(path, status), _accuracy(path, result), changed, owner)


def _owner(run: Path) -> tuple[bool, str]:
    """Return (whether the owner is alive, who it is); (False, "") without an owner."""
    try:
        seen = read_owner(run / FILE)
    except OSError:
        return False, ""
    if seen.owner is None:
        return seen.seems_alive(), "unknown"
    job = f", job {seen.owner.job}" if seen.owner.job else ""
    return seen.seems_alive(), f"{seen.owner.host} {seen.owner.pid}{job}"


def _epoch(run: Path, status: Mapping[str, Any]) -> str:
    import yaml

    try:
        text = read_regular_file(run / "config.yaml", MAX_BYTES, follow=True)
        epochs = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["epochs"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        epochs = "?"
    return f"{status.get('epoch', '?')}/{epochs}"


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
