"""What a process knows of the program that started it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The parent is what runs this; the child says what it knows of its parent.
CHILD = """
import sys
from accel_train.launch.process import launcher_command, only_launcher_set
print(only_launcher_set("OMP_NUM_THREADS", "--threads"), *launcher_command()[-2:])
"""
# A program with the name of a launcher, which starts the words that follow with OMP_NUM_THREADS=1, as torchrun does.
LAUNCHER = """
import os, subprocess, sys
environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
sys.exit(subprocess.run([sys.executable, "-c", os.environ["CHILD"]], env=environment).returncode)
"""


@pytest.mark.parametrize(
    ("name", "options", "variables", "expected"),
    [
        ("torchrun", ["script"], {}, "True"),
        ("torchrun", ["--threads", "2"], {}, "False"),
        ("torchrun", ["script"], {"OMP_NUM_THREADS": "3"}, "False"),
        ("job_script", ["script"], {}, "False"),
    ],
)
def test_what_only_the_launcher_has_set_is_told_from_the_users_choice(
    tmp_path, name: str, options: list[str], variables: dict[str, str], expected: str
) -> None:
    program = tmp_path / name
    program.write_text(LAUNCHER)
    clean = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")}
    done = subprocess.run(
        [sys.executable, str(program), "run", *options],
        env={**clean, **variables, "CHILD": CHILD},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    command = f" {' '.join(['run', *options][-2:])}" if name == "torchrun" else ""
    assert done.stdout.strip() == f"{expected}{command}"
