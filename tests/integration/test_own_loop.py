"""examples/segmentation.py: a loop of one's own is killed, stopped, continued on other numbers of processes.

Beside it examples/segmentation_plain.py: what docs/from_python.md says of plain Accelerate.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

EXAMPLES = helpers.ROOT / "examples"
EXAMPLE, PLAIN = EXAMPLES / "segmentation.py", EXAMPLES / "segmentation_plain.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", helpers.MULTI_CPU, "--num_processes")
pytestmark = pytest.mark.timeout(400)


def trained(run: Path, *words: object, processes: int = 1, launcher: bool = False, program: Path = EXAMPLE) -> str:
    """Train to the end and return what was printed."""
    line = (program, "--output-dir", run, *words)
    if launcher:
        done = helpers.python(*LAUNCH, processes, *line, timeout=200)
    else:
        done = helpers.python(*line, processes=processes, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Training:
    """A training of the example that runs."""

    def __init__(self, popen: helpers.Forked | helpers.World, run: Path) -> None:
        self.popen, self.run = popen, run
        self.before = self.checkpoints()

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.run.glob("checkpoints/update-*")}

    def until_saved(self) -> None:
        """Wait until it has saved a checkpoint in the middle of an epoch, as the file SAVE asks."""
        deadline = time.monotonic() + 150
        while not {name for name in self.checkpoints() - self.before if int(name[7:]) % 10}:
            assert time.monotonic() < deadline and self.popen.poll() is None, "it has not saved"
            time.sleep(0.02)


@contextlib.contextmanager
def training(run: Path, processes: int, *, launcher: bool = False) -> Iterator[Training]:
    run.mkdir(exist_ok=True)
    (run / "SAVE").touch()  # obeyed after the first update
    line, forks = (EXAMPLE, "--output-dir", run), processes
    if launcher:
        line, forks = (*LAUNCH, processes, *line), 1
    with run.with_suffix(".log").open("ab") as out:
        popen = helpers.forked(line, forks, helpers.environment(), out, out)
    try:
        yield Training(popen, run)
    finally:
        helpers._end(popen)


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def figures(output: str) -> list[str]:
    """The lines of the evaluations."""
    return re.findall(r"^epoch \d+: test .*$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An uninterrupted run on one process, and the lines of its evaluations."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, figures(trained(run))


@pytest.mark.slow
def test_it_learns_and_counts_each_test_sample_once(whole: tuple[Path, list[str]], monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("segmentation")

    model = example.UNet().eval()
    model.load_state_dict(load_file(whole[0] / "model.safetensors"))
    images, masks = example.draw(example.TRAIN + torch.arange(example.TEST))
    with torch.inference_mode():
        found = torch.cat([model(some).argmax(1) for some in images.split(10)])
    one_hot = [F.one_hot(each, example.CLASSES).bool().flatten(0, 2) for each in (found, masks)]
    union = (one_hot[0] | one_hot[1]).sum(0)
    iou = ((one_hot[0] & one_hot[1]).sum(0) / union).mean().item()
    assert whole[1][-1].endswith(f"mean IoU {iou}")
    assert iou > 0.9 and len(whole[1]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "launcher"), [(2, True), (3, False)])
def test_the_weights_and_figures_are_the_same_on_any_number_of_processes(
    whole: tuple[Path, list[str]], processes: int, launcher: bool, tmp_path: Path
) -> None:
    output = trained(tmp_path / "run", processes=processes, launcher=launcher)
    assert weights(tmp_path / "run") == weights(whole[0])
    assert figures(output) == whole[1]


@pytest.mark.slow
def test_killed_stopped_and_continued_on_other_numbers_of_processes(
    whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with training(run, 2) as killed:  # the first start
        killed.until_saved()
        killed.popen.send_signal(signal.SIGKILL)
        killed.popen.wait(30)
    assert (run / "owner.json").exists()
    with training(run, 3) as stopped:  # the first continuation
        stopped.until_saved()
        stopped.popen.send_signal(signal.SIGTERM)
        assert stopped.popen.wait(60) == 0
    assert "the same command goes on" in run.with_suffix(".log").read_text()
    assert not (run / "owner.json").exists()
    with training(run, 2, launcher=True) as ended:  # the second one: the launcher passes its signal on
        ended.until_saved()
        ended.popen.send_signal(signal.SIGTERM)
        ended.popen.wait(60)
    assert run.with_suffix(".log").read_text().count("the same command goes on") == 2
    output = trained(run)  # the third one
    assert weights(run) == weights(whole[0])
    assert figures(output)[-1] == whole[1][-1]


@pytest.mark.slow
def test_more_epochs_later_are_the_same_as_at_once(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, "--epochs", 2, processes=2)
    assert weights(run) != weights(whole[0])
    assert figures(trained(run, processes=2)) == whole[1][2:]
    assert weights(run) == weights(whole[0])
    assert figures(trained(run)) == []  # the third step: nothing is left
    assert weights(run) == weights(whole[0])


@pytest.mark.slow
def test_a_run_of_the_trainer_and_one_of_a_loop_of_ones_own_do_not_mix(tmp_path: Path) -> None:
    done = helpers.run("digits", "--epochs", 1, "--data.train-limit", 64, "--output-dir", tmp_path / "digits")
    assert done.returncode == 0, done.stderr
    done = helpers.python(EXAMPLE, "--output-dir", tmp_path / "digits")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "program: None -> accel_train.parts" in line
    assert line.endswith("Give the old ones, or another --output-dir.")
    trained(tmp_path / "own", "--epochs", 1)
    done = helpers.run("digits", "--epochs", 3, "--output-dir", tmp_path / "own")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_in_plain_accelerate_two_processes_learn_something_else(tmp_path: Path) -> None:
    trained(tmp_path / "1", "--epochs", 1, program=PLAIN)
    trained(tmp_path / "2", "--epochs", 1, program=PLAIN, processes=2)
    assert weights(tmp_path / "1") != weights(tmp_path / "2")
