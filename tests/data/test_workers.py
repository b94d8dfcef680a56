"""The data workers: forked from a server, never from the trainer, and ended when the trainer ends."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.context import set_spawning_popen
from multiprocessing.popen_forkserver import Popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import helpers
import psutil
import pytest
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.folder import FileImages
from accel_train.data.sources.index import SplitFiles, StringArray
from accel_train.data.workers import BatchDataset

TRAINER = """
import sys
from torch.utils.data import DataLoader, Dataset
from accel_train.data import workers
from accel_train.data.worker_processes import WorkerContext, end_with_trainer
from accel_train.data.sources.arrays import Synthetic
if __name__ != "__main__":
    open("imported-again", "w").close()
from accel_train.data.order import EvaluationSampler
source = Synthetic("train", 0, 64, channels=1, size=8)
loader = DataLoader(
    workers.BatchDataset(source, None, 0), batch_sampler=EvaluationSampler(64, 8), collate_fn=workers.no_collate,
    num_workers=2, persistent_workers=True, worker_init_fn=end_with_trainer,
    multiprocessing_context=WorkerContext(workers.__name__),
)
batches = iter(loader)
next(batches)
print("started", flush=True)
sys.stdin.readline()
print(sum(len(batch["ids"]) for batch in batches), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the user has the name of a module')")
    program = tmp_path / "bin" / "trainer.py"
    program.parent.mkdir()
    program.write_text(TRAINER)
    popen = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(helpers.ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert popen.stdout is not None and popen.stdin is not None
    try:
        assert popen.stdout.readline() == "started\n"
        yield popen
    finally:
        popen.kill()
        popen.communicate()


def children_of(popen: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the trainer's descendants: the server, its two workers, and multiprocessing's resource tracker."""
    found = psutil.Process(popen.pid).children(recursive=True)
    assert len(found) == 4
    return found


@pytest.mark.ci
def test_workers_end_with_a_trainer_that_is_killed(trainer: subprocess.Popen[str]) -> None:
    started = children_of(trainer)
    trainer.kill()
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
def test_a_stop_signal_to_every_process_leaves_the_workers_to_the_trainer(
    trainer: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert trainer.stdin is not None and trainer.stdout is not None
    started = children_of(trainer)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for child in started:
            child.send_signal(number)
    time.sleep(0.2)
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.stdout.readline() == "56\n"
    assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in started)
    assert not (tmp_path / "imported-again").exists()  # the main module is the trainer's alone


class Spawning:
    """Takes the file descriptors of pickled tensors, as multiprocessing's Popen does."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def duplicate_for_child(self, file: int) -> int:
        self.files.append(os.dup(file))
        return len(self.files) - 1

    DupFd = Popen.DupFd


def given(value: Any) -> tuple[int, int]:
    """Return the numbers of bytes and of file descriptors that a worker receives."""
    spawning = Spawning()
    buffer = io.BytesIO()
    set_spawning_popen(spawning)  # type: ignore[arg-type]
    try:
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    finally:
        set_spawning_popen(None)
        for file in spawning.files:
            os.close(file)
    return len(buffer.getvalue()), len(spawning.files)


def test_a_worker_is_not_sent_what_it_can_share() -> None:
    paths = [f"class/{number:060d}.jpg" for number in range(2000)]
    files = FileImages(Path("/nowhere"), SplitFiles(StringArray(paths), torch.arange(2000)), Data())
    assert files.paths[1999] == paths[1999]
    size, descriptors = given(BatchDataset(files, None, 0))
    assert size < 40 * 300 and descriptors < 8
