"""Let programs take turns: one runs for a moment while all others are stopped.

The speed of a shared machine can change by 10% within seconds, so programs that are measured one after the other cannot
be compared. Within a round of turns conditions are nearly the same, so its ratios are valid.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil
import tasks

LOOK_SECONDS = 0.002  # between two checks of a program's progress


class Program:
    """A program that runs only while it has its turn. Its data workers and launched processes run and stop with it.

    words: arguments of python; log: file of its output; variables: added to its environment.
    """

    def __init__(self, words: Sequence[object], log: Path, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self.line = [sys.executable, *map(str, words)]
        self.log = log
        environment = {**tasks.environment(), **variables}
        with log.open("wb") as output:
            self.process = psutil.Popen(
                self.line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        self.family: list[psutil.Process] = [self.process]

    def run(self, done: Callable[[], bool], look: float) -> float:
        """Let it run until `done`, asked every `look` seconds; return the seconds. SystemExit if it ends before."""
        start = time.perf_counter()
        self._send("resume")
        while not done():
            if self.process.poll() is not None and not done():  # what it wrote last may be what was waited for
                raise SystemExit(f"{' '.join(self.line)} has ended:\n{self.log.read_text()[-2000:]}")
            time.sleep(look)
        self._send("suspend")
        seconds = time.perf_counter() - start
        self._suspend_new()
        return seconds

    def end(self) -> None:
        """Kill all of its processes at once, as when the power goes: none sees another one die."""
        self._send("suspend")
        self._suspend_new()
        self._send("kill")
        psutil.wait_procs(self.family, timeout=30)

    def _suspend_new(self) -> None:
        """Stop data workers and launched processes that are new."""
        with contextlib.suppress(psutil.NoSuchProcess):  # the program has ended
            while new := [each for each in self.process.children(recursive=True) if each not in self.family]:
                self.family += new
                self._send("suspend")  # so that they start no more

    def _send(self, what: str) -> None:
        for each in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(each, what)()


class Contestant(Program):
    """A program that writes its progress to a file, as JSON lines with an "update". It is stopped between turns.

    words, log, variables: as Program has them; progress: the file with its progress (None: its output); updates: number
    in a turn; images: number in an update.
    """

    def __init__(
        self,
        words: Sequence[object],
        log: Path,
        *,
        updates: int,
        images: int,
        progress: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(words, log, variables)
        self.progress, self.updates, self.images = progress or log, updates, images
        self.goal = 0
        try:
            self.turn()  # until it has started and is warm
        except BaseException:
            self.end()
            raise

    def turn(self) -> float:
        """Let the program do the updates of one turn. Returns its images per second."""
        self.goal += self.updates
        seconds = self.run(lambda: self._updates() >= self.goal, LOOK_SECONDS)
        return self.updates * self.images / seconds

    def _updates(self) -> int:
        """Return the last update in the progress file; 0 if there is none."""
        try:
            with self.progress.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 10_000))
                updates = re.findall(rb'"update": (\d+)', file.read())
        except FileNotFoundError:
            return 0
        return int(updates[-1]) if updates else 0


@contextlib.contextmanager
def contest(starts: dict[str, Callable[[Path], Contestant]]) -> Iterator[dict[str, Contestant]]:
    """Start the contestants, each with its own folder, and yield them by name, all stopped."""
    contestants: dict[str, Contestant] = {}
    with tempfile.TemporaryDirectory() as root:
        try:
            for number, (name, start) in enumerate(starts.items()):
                folder = Path(root) / str(number)
                folder.mkdir()
                contestants[name] = start(folder)
            yield contestants
        finally:
            for contestant in contestants.values():
                contestant.end()


def rounds(contestants: dict[str, Contestant], count: int) -> Iterator[dict[str, float]]:
    """Yield the images per second of each contestant, for `count` rounds in random order."""
    for _ in range(count):
        yield {name: contestants[name].turn() for name in random.sample(list(contestants), len(contestants))}
