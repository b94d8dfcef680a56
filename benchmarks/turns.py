"""Programs that take turns: one goes on for half a second while all others stand still.

The speed of a machine that others share drifts by a tenth within seconds. Programs that are measured one after the
other see different machines; within a round of turns they see the same one, and a ratio of that round holds.
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

LOOK_SECONDS = 0.002  # between two looks at whether a program has come far enough


class Contestant:
    """A program that tells in a file how far it is: in JSON lines, with "update": their number. It stands still now.

    words: of python's command line; log: where its output goes; progress: the file (its output, if None);
    updates: of a turn; images: of an update; variables: of its environment.
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
        self.line = [sys.executable, *map(str, words)]
        self.log, self.progress, self.updates, self.images = log, progress or log, updates, images
        self.goal = 0
        environment = {**tasks.environment(), **variables}
        with log.open("wb") as output:
            self.process = psutil.Popen(
                self.line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        self.family: list[psutil.Process] = [self.process]
        try:
            self.turn()  # until it has started and is warm
        except BaseException:
            self.end()
            raise

    def turn(self) -> float:
        """Let it do its updates. Returns its images per second."""
        self.goal += self.updates
        start = time.perf_counter()
        self._send("resume")
        while self._updates() < self.goal:
            if self.process.poll() is not None:
                raise SystemExit(f"{' '.join(self.line)} has ended:\n{self.log.read_text()[-2000:]}")
            time.sleep(LOOK_SECONDS)
        self._send("suspend")
        seconds = time.perf_counter() - start
        self._suspend_new()
        return self.updates * self.images / seconds

    def end(self) -> None:
        self._send("suspend")
        self._suspend_new()
        self._send("kill")
        self.process.wait()

    def _updates(self) -> int:
        """That it has told of."""
        try:
            with self.progress.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 10_000))
                found = re.findall(rb'"update": (\d+)', file.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def _suspend_new(self) -> None:
        """Data workers and launched processes, too: also those that are new."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            while new := [each for each in self.process.children(recursive=True) if each not in self.family]:
                self.family += new
                self._send("suspend")  # so that they start no others

    def _send(self, what: str) -> None:
        for each in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(each, what)()


@contextlib.contextmanager
def contest(starts: dict[str, Callable[[Path], Contestant]]) -> Iterator[dict[str, Contestant]]:
    """Contestants that stand still, by their names. Each is started with a folder of its own."""
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
    """Images per second of each, `count` times; within a round in an order that is drawn."""
    for _ in range(count):
        yield {name: contestants[name].turn() for name in random.sample(list(contestants), len(contestants))}
