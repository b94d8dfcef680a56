"""A run under attack: its starts, those that sleep while another start has taken their run over, and what happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import helpers
from siege import FallenError, check

from accel_train.launch.process import has_ended, start_time
from accel_train.ownership.owner import FILE

PATIENCE = 150.0  # seconds for what takes two or three on an idle machine; more is a hang


class Start(helpers.Started):
    """A start of the run on so many processes."""

    def __init__(self, run: Path, log: Path, words: list[str], processes: int, *, launcher: bool) -> None:
        line = helpers.command(*words, processes=processes)[1:] if launcher else ["-m", "accel_train.train", *words]
        with log.open("wb") as out:
            popen = helpers.forked(line, 1 if launcher else processes, helpers.environment(), out, out)
        super().__init__(popen, run, log)
        self.processes, self.launcher = processes, launcher
        self.was_finished = False  # when it was suspended
        self._seen: dict[int, str] = {}  # processes, and when they were started

    def look(self) -> None:
        """Note which processes it has: those of a launcher that has died are found no more."""
        for pid in self.family() if self.lives else ():
            if began := start_time(pid):
                self._seen.setdefault(pid, began)

    def left(self) -> list[int]:
        """Return those of its processes that exist still."""
        return [pid for pid, began in self._seen.items() if not has_ended(pid, began)]

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    @property
    def owns(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run / FILE).read_text())["pid"] in self.pids()
        return False

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the start at once."""
        self.look()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise FallenError(f"it does not end by itself: {self.log.name}\n{self.output[-2000:]}") from None


class Scene:
    """The run, and the start that owns it, or soon will."""

    def __init__(self, folder: Path, words: list[str], worlds: list[int], epochs: int, chance: random.Random) -> None:
        self.folder, self.run, self.words, self.worlds = folder, folder / "run", words, worlds
        self.epochs, self.chance = epochs, chance
        self.living: Start | None = None
        self.sleepers: list[Start] = []
        self.starts: list[Start] = []
        self.story: list[str] = []
        self._began = time.monotonic()

    def start(self, *more: str) -> Start:
        """Start the run on some number of processes."""
        words = [*self.words, "--epochs", str(self.epochs), "--output-dir", str(self.run), *more]
        if self.sleepers:
            words += ["--take-over", "true"]  # one of them may still be the owner
        processes = self.chance.choice(self.worlds)
        launcher = processes > 1 and self.chance.random() < 0.1
        log = self.folder / f"start-{len(self.starts)}.log"
        self.tell(f"start {len(self.starts)}: {processes} processes, {' '.join(more)}")
        self.starts.append(Start(self.run, log, words, processes, launcher=launcher))
        return self.starts[-1]

    def tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:.1f} s {text}")

    def owner(self) -> Start:
        """Return the start that lives, after some moment; begin one if none does."""
        if self.living is None or not self.living.lives:
            self.living = self.start()
        self.moment(self.living)
        return self.living

    def moment(self, start: Start) -> None:
        """Wait for some moment of the start: any, one of its training, or in the middle of a save."""
        kind = self.chance.choice(["any", "training", "saving"])
        seconds, updates = self.chance.uniform(0, 1.5), self.chance.randint(1, 8)
        if kind == "training":
            size = self._log_size() + 200 * updates
            wait_for(lambda: not start.lives or self._log_size() > size)
            seconds /= 20
        elif kind == "saving":
            wait_for(lambda: not start.lives or list(self.run.glob("checkpoints/.update-*.tmp")), every=0.0005)
            seconds /= 200
        time.sleep(seconds)
        start.look()
        self.tell(f"{kind} {seconds:.2f} s" + ("" if start.lives else " (it has ended)"))

    def wake(self, sleeper: Start) -> None:
        """Let one go on whose run another start has: it has to end, and to say why."""
        self.sleepers.remove(sleeper)
        sleeper.signal(signal.SIGCONT)
        self.tell(f"{sleeper.log.stem} wakes")
        code = sleeper.end()
        self.tell(f"and ends with {code}")
        if not sleeper.was_finished:
            right = code == 2 if sleeper.processes == 1 else code != 0
            check(
                right, f"{sleeper.log.stem} slept while its run was taken over, and ends with {code}:\n{sleeper.output}"
            )

    def finish(self) -> None:
        """Let the run come to its end, and all who sleep wake after that."""
        if self.living is not None and self.living.lives:
            self.tell(f"it may end: {self.living.end()}")
        code = self.start().end()
        check(code == 0, f"the last start ends with {code}:\n{self.starts[-1].output[-2000:]}")
        for sleeper in list(self.sleepers):
            self.wake(sleeper)
        # The ranks of a launcher that was killed at its start are still importing, and see its death only afterwards.
        wait_for(lambda: not any(start.left() for start in self.starts), most=PATIENCE)
        left = {start.log.stem: start.left() for start in self.starts if start.left()}
        check(not left, f"these processes outlive their start by far: {left}")

    def kill_all(self) -> None:
        for start in self.starts:
            start.signal(signal.SIGKILL)
            start.popen.wait(PATIENCE)

    def _log_size(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run / "metrics.jsonl").stat().st_size
        return 0


def wait_for(happened: Callable[[], object], every: float = 0.01, most: float = 20) -> None:
    """Wait until it has happened, but for `most` seconds only: then another moment is as good."""
    end = time.monotonic() + most
    while not happened() and time.monotonic() < end:
        time.sleep(every)
