"""A process that is lost before the watchdog begins."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import helpers
import pytest

KILLED = """
import os, signal, sys
from accel_train.cli import main
from accel_train.models import trial
from accel_train.ownership.claim import Claim

def die(*arguments, **more):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(*{"claim": (Claim, "attempt"), "trial": (trial, "try_model")}[sys.argv[1]], die)  # the main process calls them
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("when", ["claim", "trial"])
def test_the_others_say_in_a_line_that_the_main_process_was_lost(when: str, tmp_path: Path) -> None:
    done = helpers.python("-c", KILLED, when, "digits", "--output-dir", tmp_path / "run", processes=2)
    assert done.returncode == -signal.SIGKILL
    (line,) = done.stderr.splitlines()
    assert f"{os.uname().nodename} has lost another process, which was killed or has failed" in line
