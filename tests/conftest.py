"""Fixtures of several test files: a real run, trained once."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
from hypothesis import settings

# One thread in each process: the tests themselves run in parallel. Before torch is imported, which reads it.
os.environ["OMP_NUM_THREADS"] = "1"

# Hypothesis measures time, too, and would fail tests on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_unconfigure() -> None:
    """Print all stacks if the interpreter does not end after the tests, and end it."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


LONGEST = ("test_slurm.py", "test_docs.py", "test_siege_of_runs.py", "test_restart.py", "test_pretended_gpu.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: then no worker is left with one of them while the others are done."""

    def place(item: pytest.Item) -> int:
        if item.path.name in LONGEST:
            return LONGEST.index(item.path.name)
        starts_processes = item.path.parent.name in ("integration", "cluster", "doctor", "siege")
        return len(LONGEST) + (not starts_processes)

    items.sort(key=place)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of digits, with a validation split and an EMA. A test that changes it copies it."""
    run = tmp_path_factory.mktemp("digits") / "run"
    words = (
        "train digits --epochs 2 --ema.enabled true --ema.decay 0.8 --data.val-fraction 0.1 "
        f"--checkpoint.keep 3 --output-dir {run}"
    ).split()
    done = helpers.python("-m", "accel_train", *words)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset this process before each command line, as if a new program started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    yield
    helpers.forget_accelerate()
