"""The internals of torch that the package uses: a new version that changes one of them fails here first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed

from accel_train.launch import parent
from accel_train.launch.torch_internals import process_group_store, set_collective_timeout, set_store_timeout

# The parent is what runs this; the child says what it knows of its parent.
CHILD = """
import sys
from accel_train.launch.parent import launcher_command, only_launcher_set
print(only_launcher_set("OMP_NUM_THREADS", "--threads"), *launcher_command()[-2:])
"""
# A program with the name of a launcher, which starts the words that follow with OMP_NUM_THREADS=1, as torchrun does.
LAUNCHER = """
import os, subprocess, sys
environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
sys.exit(subprocess.run([sys.executable, "-c", os.environ["CHILD"]], env=environment).returncode)
"""


@pytest.fixture
def group() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_time_outs_of_collectives_and_of_the_store_are_set(group: None) -> None:
    set_collective_timeout(7)
    assert distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    set_store_timeout(0.2)
    with pytest.raises(RuntimeError, match=r"(?i)time"):  # and not after the 300 s of a new store
        process_group_store().get("nobody sets this")


def test_without_a_process_group_time_outs_have_no_effect() -> None:
    set_collective_timeout(7)
    set_store_timeout(7)


def test_the_store_has_the_keys_of_all_connections(group: None) -> None:
    copy = distributed.PrefixStore("watchdog", process_group_store().clone())
    copy.set("key", "value")
    assert process_group_store().get("watchdog/key") == b"value"
    assert copy.compare_set("end", "", "first") == b"first"
    assert copy.compare_set("end", "", "second") == b"first"


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


def test_this_process_has_a_parent() -> None:
    process, command = parent.parent_process()
    assert process.pid == os.getppid() and command
