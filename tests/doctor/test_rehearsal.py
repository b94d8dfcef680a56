"""Launches of the same kind as the doctor's own: their command lines, and the way of a signal through real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_train.config.options import parse
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS
from accel_train.doctor.rehearsal import child
from accel_train.doctor.rehearsal.child import child_command
from accel_train.doctor.rehearsal.drill import rehearsed
from accel_train.doctor.rehearsal.signals import rehearse

ACCELERATE = [sys.executable, str(Path(sys.executable).with_name("accelerate")), "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def launched_by(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(child, "launcher_command", lambda: command)


def test_the_command_of_accelerate_keeps_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--config_file", "a.yaml", "--num_machines", "4", "--machine_rank", "2", "--mixed_precision", "bf16"]
    launched_by(monkeypatch, [*ACCELERATE, *given, "-m", "accel_train", "doctor", "-m", "--num_machines", "7"])
    words = child_command(2, "some.module", "folder")
    assert words[: len(ACCELERATE) + len(given)] == [*ACCELERATE, *given]
    assert words[-3:] == ["--module", "some.module", "folder"] and "accel_train" not in words

    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args(words[len(ACCELERATE) :])
    assert (parsed.num_machines, parsed.num_processes, parsed.machine_rank) == (1, 2, 0)
    assert (parsed.config_file, parsed.mixed_precision, parsed.main_process_ip) == ("a.yaml", "bf16", "127.0.0.1")
    assert (parsed.training_script, parsed.training_script_args, parsed.module) == ("some.module", ["folder"], True)


@pytest.mark.parametrize("script", [["-m", "accel_train"], ["accel_train/train.py"], ["--no-python", "python"]])
def test_the_command_of_torchrun_keeps_its_options(monkeypatch: pytest.MonkeyPatch, script: list[str]) -> None:
    launched_by(monkeypatch, [*TORCHRUN, "--nnodes=4", "--node-rank", "1", "--max-restarts=3", *script, "doctor"])
    words = child_command(3, "some.module", "folder")

    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words[len(TORCHRUN) :])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("1", "3", 3)
    assert (parsed.module, parsed.no_python, parsed.training_script) == (True, False, "some.module")
    assert parsed.training_script_args == ["folder"]


def test_without_a_launcher_and_with_a_strange_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, [])
    assert child_command(1, "some.module") == [sys.executable, "-m", "some.module"]
    launched_by(monkeypatch, [*TORCHRUN, "--an-option-of-the-future", "1", "-m", "accel_train"])
    with pytest.raises(ValueError, match="an-option-of-the-future"):
        child_command(1, "some.module")


def test_the_drill_tells_no_tracker_and_has_enough_updates() -> None:
    config = parse(["digits", "--epochs", "1", "--trackers", "wandb", "--optim.lr", "0.5"])
    found = rehearsed(config)
    assert (found.trackers, found.epochs, found.optim.lr) == ((), 9, 0.5)
    assert rehearsed(parse(["digits", "--epochs", "20"])).epochs == 20


def torchrun_script(folder: Path, shell: str) -> list[str]:
    """A `torchrun` that is a shell script, as users write them."""
    script = folder / "torchrun"
    script.write_text(f'#!/bin/bash\n{shell}\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    script.chmod(0o755)
    return ["/bin/bash", str(script), "-m", "accel_train", "doctor"]


@pytest.mark.slow
def test_a_launcher_that_a_signal_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun has no handler of SIGUSR1: the kernel ends it, and it does not even end its processes."""
    launched_by(monkeypatch, torchrun_script(tmp_path, ""))
    (tmp_path / "a").mkdir()
    finding = rehearse(2, tmp_path / "a", patience=60)
    assert finding.status == FAIL and finding.measured.startswith("SIGUSR1 ends the launcher"), finding
    assert "trap" in finding.advice


@pytest.mark.slow
def test_a_launcher_that_ignores_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, torchrun_script(tmp_path, "trap '' USR1"))
    (tmp_path / "a").mkdir()
    finding = rehearse(2, tmp_path / "a", patience=60)
    assert finding.status == PASS and "2 of 2" in finding.measured, finding


@pytest.mark.slow
def test_a_launcher_whose_processes_do_not_hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those behind a wrapper that keeps the signals which it gets."""
    launched_by(monkeypatch, torchrun_script(tmp_path, "trap '' USR1"))
    monkeypatch.setattr(child.Child, "send", lambda self, number: None)
    monkeypatch.setattr("accel_train.doctor.rehearsal.signals.WAIT_SECONDS", 0.5)
    (tmp_path / "a").mkdir()
    finding = rehearse(2, tmp_path / "a", patience=60)
    assert finding.status == FAIL and finding.measured == "SIGUSR1 reached 0 of 2 processes"


def test_a_launcher_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, torchrun_script(tmp_path, "echo no licence; exit 3"))
    finding = rehearse(2, tmp_path, patience=60)
    assert finding.status == NOT_CHECKED and "no licence" in finding.measured
