"""Start real runs in their own processes, with and without the launcher, and follow them."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from fork_server import POLL_SECONDS, Forked, server

ROOT = Path(__file__).parent.parent
MULTI_CPU = ROOT / "accelerate_configs" / "multi_cpu.yaml"


def command(*words: object, processes: int = 1) -> list[str]:
    """Return the command line of `accel-train train WORDS`, for several processes under accelerate's launcher."""
    python = [sys.executable, "-m"]
    if processes > 1:
        launcher = ["accelerate.commands.launch", "--config_file", str(MULTI_CPU), "--num_processes", str(processes)]
        python += [*launcher, "-m"]
    return [*python, "accel_train.train", *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without the variables of launchers, plus the given ones."""
    launchers = ("SLURM_", "PMI_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**clean, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TERM": "dumb", **variables}


_ports = itertools.count(os.getpid() * 101)  # other processes that run tests begin elsewhere


def free_port() -> str:
    """Return a free port, outside the range from which Linux takes the ports that it gives out itself."""
    while True:
        port = 10000 + next(_ports) % 10000
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return str(port)


class World:
    """Several forked processes. When one fails, the others get SIGTERM, as from a launcher."""

    def __init__(self, processes: list[Forked]) -> None:
        self.processes, self.pid = processes, processes[0].pid
        self._failed: float | None = None
        self._code = 0  # of the process that failed first

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """Return None while a process runs; then 0, or the exit code of the first that failed."""
        codes = [process.poll() for process in self.processes]
        self._code = self._code or next((code for code in codes if code), 0)
        if any(codes) and None in codes:
            if self._failed is None:
                self._failed = time.monotonic()
                self.send_signal(signal.SIGTERM)
            elif time.monotonic() - self._failed > 30:  # torchrun's patience
                self.send_signal(signal.SIGKILL)
        return None if None in codes else self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.processes[0].args, timeout)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)


def forked(
    words: Sequence[object], processes: int, env: dict[str, str], out: BinaryIO, err: BinaryIO, cwd: Path | None = None
) -> Forked | World:
    """Start `python WORDS` from the fork server; several processes get the variables that a launcher sets."""
    if processes == 1:
        return server().popen(words, env, out, err, cwd)
    size = str(processes)
    env = env | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return World([server().popen(words, env | rank, out, err, cwd) for rank in ranks])


class Captured:
    """`python WORDS` in forked processes, with what they write on stdout and stderr."""

    def __init__(
        self, words: Sequence[object], env: dict[str, str], *, processes: int = 1, cwd: Path | None = None
    ) -> None:
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 -- read later
        self.popen = forked(words, processes, env, *self._files, cwd)

    @property
    def returncode(self) -> int | None:
        return self.popen.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr. After the time-out, kill all and raise TimeoutExpired."""
        try:
            self.popen.wait(timeout)
        finally:
            self.kill()
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(io.TextIOWrapper(file, errors="replace").read())
        return texts[0], texts[1]

    def kill(self) -> None:
        _end(self.popen)


def python(
    *words: object, processes: int = 1, timeout: float = 120, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to the end in forked processes; stdout and stderr are text."""
    started = Captured(words, environment(**variables), processes=processes, cwd=cwd)
    texts = started.communicate(timeout)
    assert started.returncode is not None
    return subprocess.CompletedProcess([*map(str, words)], started.returncode, *texts)


def run(
    *words: object,
    processes: int = 1,
    timeout: float = 120,
    launcher: bool = False,
    fresh: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run `accel-train train WORDS` to the end; stdout and stderr are text. `launcher` and `fresh`: see `started`."""
    if fresh:
        line = command(*words, processes=processes)
        return subprocess.run(line, env=environment(**variables), capture_output=True, text=True, timeout=timeout)
    line, forks = _forks(words, processes, launcher=launcher)
    return python(*line, processes=forks, timeout=timeout, **variables)  # type: ignore[arg-type]


def _forks(words: Sequence[object], processes: int, *, launcher: bool) -> tuple[Sequence[object], int]:
    """Return what to fork for `accel-train train WORDS`, `python …`, and how often: the launcher only once."""
    if launcher:
        return command(*words, processes=processes)[1:], 1
    return ("-m", "accel_train.train", *words), processes


class Started:
    """A running training: `popen` is the process that was started (the launcher, if there is one)."""

    def __init__(self, popen: subprocess.Popen[Any] | Forked | World, run: Path, log: Path) -> None:
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
        return lines_of(self.run, "event")

    def pids(self) -> list[int]:
        """Return the training processes by rank; those of a launcher are found by their environment."""
        if isinstance(self.popen, World):
            return [process.pid for process in self.popen.processes]
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

    def family(self) -> list[int]:
        """Return all processes of the run: the launcher, the ranks, and their children."""
        first = [self.popen.pid] if not isinstance(self.popen, World) else self.pids()
        return [member for process in first for member in _family(process)]

    def until(self, happened: Callable[[], Any], timeout: float = 90) -> None:
        """Wait until the condition is true. Fails if the run ends before, or after too long."""
        deadline = time.monotonic() + timeout
        while not happened():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it did not happen (exit code {self.popen.poll()}):\n{self.output}")
            time.sleep(0.05)

    def until_trained(self, updates: int = 1) -> None:
        self.until(lambda: self.status.get("state") == "training" and self.status.get("update", 0) >= updates)

    def ended(self, timeout: float = 90) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output}") from None


@contextlib.contextmanager
def started(
    directory: Path, *words: object, processes: int = 1, launcher: bool = False, fresh: bool = False, **variables: str
) -> Iterator[Started]:
    """Start a run with --output-dir `directory`; whatever is left of it is killed in the end.

    `launcher`: several processes are not forked, but started anew by accelerate's own launcher, which is forked itself.
    `fresh`: no process is forked: a single one is started anew, and so is the launcher of several.
    """
    log = directory.with_name(f"{directory.name}.log")
    words = (*words, "--output-dir", directory)
    popen: subprocess.Popen[bytes] | Forked | World
    with log.open("wb") as out:
        if fresh:
            popen = subprocess.Popen(
                command(*words, processes=processes),
                env=environment(**variables),
                stdin=subprocess.DEVNULL,  # the tests' own may be a terminal
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A job in a shell's background, as CI may be, inherits that Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        else:
            line, forks = _forks(words, processes, launcher=launcher)
            popen = forked(line, forks, environment(**variables), out, out)
    try:
        yield Started(popen, directory, log)
    finally:
        _end(popen)


def _end(popen: subprocess.Popen[Any] | Forked | World) -> None:
    """Kill all processes of the run that still exist."""
    for process in popen.processes if isinstance(popen, World) else [popen]:
        # One that has been waited for has no number any more: it may be another's.
        for member in reversed(_family(process.pid)) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _family(process: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [process]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _parent(process: int) -> int:
    text = Path(f"/proc/{process}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def lines_of(run: Path, kind: str | None = None, split: str | None = None) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl: all, those of one kind, or the evaluations of one split."""
    whole = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [
        line
        for line in map(json.loads, whole)
        if kind in (None, line["kind"]) and (split is None or line.get("split") == split)
    ]


def result_of(run: Path) -> dict[str, Any]:
    """Return what is in result.json."""
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def go_back_to(update: int, run: Path) -> None:
    """Make the run one that was killed after the checkpoint of `update`."""
    from accel_train.checkpoint.directory import delete_checkpoint, list_updates

    for name in ("result.json", "model.safetensors", "ema.safetensors"):
        (run / name).unlink(missing_ok=True)
    for later in list_updates(run / "checkpoints"):
        if later > update:
            delete_checkpoint(run / "checkpoints", later)


def unfinish(run: Path) -> Path:
    """Make the finished run one that was killed before it wrote its result: with more epochs it goes on."""
    (run / "result.json").unlink()
    return run


def record_disk_calls(monkeypatch: Any) -> list[tuple[str, str]]:
    """Record from now on, in their order, ("fsync", the name of the file or folder) and ("rename", the new name)."""
    calls = []
    fsync, methods = os.fsync, {name: getattr(Path, name) for name in ("rename", "replace")}

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))

    def recorded(name: str) -> Callable[[Path, Path], Path]:
        def rename(path: Path, target: Path) -> Path:
            calls.append(("rename", Path(target).name))
            return methods[name](path, target)

        return rename

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    for name in methods:
        monkeypatch.setattr(Path, name, recorded(name))
    return calls


def write_digits(folder: Path, count: int = 5) -> list[Path]:
    """Write the first test images of the data set digits into `folder`, which is made, and return their files."""
    from PIL import Image

    from accel_train.config.schema import Data
    from accel_train.data.sources.load import load_splits

    test = load_splits(Data("digits"), 0).test
    assert test is not None
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{id}-is-{test.labels[id]}.png" for id in range(count)]
    for id, file in enumerate(files):
        Image.fromarray(test.fetch([id])[0][0].numpy()).save(file)
    return files


def forget_accelerate() -> None:
    """Reset Accelerate's state, which is global, so that the next program in this process starts with a new one."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system of `size` ("128k") at the new folder `place`. Skip the test if that is not possible."""
    import pytest

    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    mounted = subprocess.run(mount, capture_output=True, text=True)  # type: ignore[arg-type]
    if mounted.returncode:
        pytest.skip(f"a small file system can be mounted by root only: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def read_predictions(path: Path) -> Any:
    """What `accel-train evaluate --predictions` has written."""
    import numpy as np

    with np.load(path) as file:
        found: dict[str, Any] = {name: file[name] for name in ("ids", "labels", "logits")}
        found["paths"] = file["paths"].tolist() if "paths" in file else None
        found |= {"classes": tuple(file["classes"].tolist()), "about": json.loads(str(file["about"]))}
    return SimpleNamespace(**found)


def classes_in(path: Path) -> list[dict[str, Any]]:
    """The images in a CSV file of `accel-train predict`, with their classes, the most probable one first."""
    images: list[dict[str, Any]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["rank"] in ("", "1"):
                images.append({"image": row["image"], "error": row["error"], "predictions": []})
            if row["rank"]:
                images[-1]["predictions"].append({"class": row["class"], "probability": float(row["probability"])})
    return images
