"""Starts real runs as processes of their own, with and without the launcher, and watches what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MULTI_CPU = ROOT / "accelerate_configs" / "multi_cpu.yaml"


def command(*words: object, processes: int = 1) -> list[str]:
    """The command line of `accel-train train WORDS`, for several processes under accelerate's launcher."""
    python = [sys.executable, "-m"]
    if processes > 1:
        launcher = ["accelerate.commands.launch", "--config_file", str(MULTI_CPU), "--num_processes", str(processes)]
        python += [*launcher, "-m"]
    return [*python, "accel_train.train", *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_", "OMPI_"))}
    return {**clean, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TERM": "dumb", **variables}


def run(*words: object, processes: int = 1, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr are text."""
    line = command(*words, processes=processes)
    return subprocess.run(line, env=environment(**variables), capture_output=True, text=True, timeout=timeout)


class Started:
    """A run under way: `popen` is the process that was started (the launcher's, if there is one)."""

    def __init__(self, popen: subprocess.Popen[bytes], run: Path, log: Path) -> None:
        self.popen, self.run, self.log = popen, run, log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def status(self) -> dict[str, Any]:
        path = self.run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "event"]

    def pids(self) -> list[int]:
        """The training processes by rank, read from the environment of the started process and its children."""
        found = {}
        for process in _family(self.popen.pid):
            with contextlib.suppress(OSError):
                variables = dict(
                    entry.split("=", 1)
                    for entry in Path(f"/proc/{process}/environ").read_text().split("\0")
                    if "=" in entry
                )
                if "RANK" in variables and _parent(process) == self.popen.pid:
                    found[int(variables["RANK"])] = process
        return [found[rank] for rank in sorted(found)] or [self.popen.pid]

    def until(self, happened: Callable[[], Any], timeout: float = 90) -> None:
        """Wait until something has happened; an error if the run ends before, or if it takes too long."""
        deadline = time.monotonic() + timeout
        while not happened():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it did not happen (exit code {self.popen.poll()}):\n{self.output}")
            time.sleep(0.05)

    def until_trained(self, updates: int = 1) -> None:
        self.until(lambda: self.status.get("state") == "training" and self.status.get("update", 0) >= updates)

    def ended(self, timeout: float = 90) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output}") from None


@contextlib.contextmanager
def started(directory: Path, *words: object, processes: int = 1, **variables: str) -> Iterator[Started]:
    """Start a run with --output-dir `directory`; whatever is left of it is killed in the end."""
    log = directory.with_name(f"{directory.name}.log")
    line = command(*words, "--output-dir", directory, processes=processes)
    with log.open("wb") as out:
        popen = subprocess.Popen(
            line,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,  # the tests' own may be a terminal
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A job in a shell's background, as CI may be, inherits that Ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield Started(popen, directory, log)
    finally:
        for process in reversed(_family(popen.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def _family(process: int) -> list[int]:
    """A process and all that descend from it."""
    found = [process]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _parent(process: int) -> int:
    text = Path(f"/proc/{process}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])
